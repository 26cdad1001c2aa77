"""Documents in rows: every token once, and few rows."""

import numpy as np
import pytest

from tfopt.pipelines.text.packing import pack


def assert_packed(lengths, size):
    """Every piece lies in one row, rows are not overfull, pieces follow one another; returns the rows."""
    packing = pack(lengths, size)
    rows = len(packing.rows) - 1
    taken = np.add.reduceat(packing.lengths, packing.rows[:-1]) if rows else np.zeros(0)
    assert (taken <= size).all()
    assert packing.rows[0] == 0
    assert packing.rows[-1] == len(packing.lengths)
    covered = [np.zeros(length, int) for length in lengths]
    for document, offset, length in zip(packing.documents, packing.offsets, packing.lengths, strict=True):
        assert length > 0
        covered[document][offset : offset + length] += 1
    assert all((each == 1).all() for each in covered)
    assert (packing.offsets % size == 0).all()  # a long document is cut as seldom as it can be
    for row in range(rows):
        within = packing.documents[packing.rows[row] : packing.rows[row + 1]]
        assert (np.diff(within) > 0).all()
    assert (np.diff(packing.documents[packing.rows[:-1]]) >= 0).all()
    return rows


@pytest.mark.parametrize(
    ("lengths", "size", "rows"),
    [
        ([3, 2, 1], 8, 1),
        ([8, 8], 8, 2),
        ([9], 8, 2),
        ([17, 7], 8, 3),
        ([5, 5, 3, 3], 8, 2),
        ([4, 4, 4, 4, 1], 8, 3),
        ([0, 3, 0], 8, 1),
        ([24], 8, 3),
        ([1] * 16, 2, 8),
    ],
)
def test_known_packings(lengths, size, rows):
    assert assert_packed(lengths, size) == rows


@pytest.mark.parametrize("size", [512, 1024])
def test_nearly_all_of_the_rows_is_used(size):
    """Lengths as texts have them: log-normal, a few hundred tokens in the middle."""
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(5.5, 1.0, 5000).astype(int))
    packing = pack(lengths, size)
    assert lengths.sum() / (size * (len(packing.rows) - 1)) >= 0.99
