"""Cases of Parquet files: rows of many columns, held in memory, and read by row group in each epoch."""

from unittest import mock

import numpy as np
import tensorflow as tf

from pipeline_cases import GRAIN, HAND, TFOPT, Case, Way, at_least, no_way
from pipeline_cases.by_grain import grain, version
from pipeline_cases.by_torch import by_torch, gathered, streamed
from pipeline_cases.of_arrays import AUTOTUNE, equal, floats, permuted, tfopt
from tfopt.pipelines import table
from tfopt.pipelines.tables import table as table_module

GROUPS = 20  # row groups of the file
_POOL = 4  # that a shuffle by hand mixes


def write(folder, scale):
    """Writes a file of 16 columns of float32 and a label; returns its path, and the floats as an array."""
    import pyarrow
    import pyarrow.parquet

    inputs, labels = floats(scale.small_rows)
    columns = {f"x{number:02}": inputs[:, number] for number in range(inputs.shape[1])}
    path = folder / "rows.parquet"
    rows = pyarrow.table(columns | {"label": labels})
    pyarrow.parquet.write_table(rows, path, row_group_size=-(-scale.small_rows // GROUPS))
    return path, inputs


def read(path, groups=None):
    """Returns the columns of a file, or of some of its row groups, as arrays."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        rows = file.read() if groups is None else file.read_row_groups([int(group) for group in groups])
    return {name: np.ascontiguousarray(rows.column(name).to_numpy()) for name in rows.column_names}


def split(columns):
    """A batch as inputs by name and labels."""
    return {name: column for name, column in columns.items() if name != "label"}, columns["label"]


def held(folder, scale):
    """Rows that fit into memory: read once."""
    path, inputs = write(folder, scale)
    batch, count = scale.batch, scale.small_rows

    def by_hand():
        columns = read(path)
        return permuted(tuple(columns.values()), batch, lambda *parts: split(dict(zip(columns, parts, strict=True))))

    def by_grain():
        columns = read(path)

        def gather(numbers):
            return split({name: column[numbers] for name, column in columns.items()})

        numbers = grain.MapDataset.range(count).seed(0).shuffle().batch(batch, drop_remainder=True)
        return numbers.map(gather).to_iter_dataset()

    note = f"grain {version()}, MapDataset: range, shuffle, batch, map that indexes each column"
    return Case(
        question=f"{count:,} rows of 16 columns and a label in a Parquet file, shuffled",
        goal=at_least(1.0),
        ways=[
            Way(TFOPT, 'table(path, label="label")', lambda: tfopt(table(path, label="label"), batch)),
            Way(HAND, "pyarrow; a permutation an epoch, one gather of each column a batch", by_hand),
            by_torch("a BatchSampler, columns indexed by batch", lambda: gathered(read(path), "label", batch)),
            Way(GRAIN, note, by_grain) if grain else no_way(GRAIN, "not installed"),
        ],
        examples=count,
        batch=batch,
        right=equal(inputs),
    )


def by_group(folder, scale):
    """Rows that are read in each epoch, as of a file larger than memory."""
    path, inputs = write(folder, scale)
    batch, count = scale.batch, scale.small_rows
    specs = {f"x{number:02}": tf.TensorSpec((None,), tf.float32) for number in range(16)}
    specs["label"] = tf.TensorSpec((None,), tf.int64)

    def pools(random):
        """Yields the rows of some row groups, shuffled, and then of others."""
        order = random.permutation(GROUPS)
        for first in range(0, GROUPS, _POOL):
            columns = read(path, order[first : first + _POOL])
            numbers = random.permutation(len(columns["label"]))
            yield {name: column[numbers] for name, column in columns.items()}

    def batches():
        """Yields batches of these; rows that do not fill one go to the next pool."""
        rest = None
        for columns in pools(np.random.default_rng()):
            if rest is not None:
                columns = {name: np.concatenate([rest[name], column]) for name, column in columns.items()}
            full = len(columns["label"]) // batch * batch
            for first in range(0, full, batch):
                yield split({name: column[first : first + batch] for name, column in columns.items()})
            rest = {name: column[full:] for name, column in columns.items()}

    def by_hand():
        spec = split(specs)
        return tf.data.Dataset.from_generator(batches, output_signature=spec).prefetch(AUTOTUNE)

    def own():
        with mock.patch.object(table_module, "_HELD_BYTES", 0):
            return tfopt(table(path, label="label"), batch)

    return Case(
        question="The same, read by row group in each epoch, as of a file larger than memory",
        goal=at_least(1.0),
        ways=[
            Way(TFOPT, 'table(path, label="label"), larger than what it holds', own),
            Way(HAND, "from_generator: batches of shuffled pools, in NumPy", by_hand),
            by_torch("IterableDataset: batches of shuffled pools, in NumPy", lambda: streamed(batches)),
            no_way(GRAIN, "it shuffles no rows of Parquet files within a pool of row groups"),
        ],
        examples=count,
        batch=batch,
        right=equal(inputs),
    )


CASES = {"parquet rows": held, "parquet rows, by row group": by_group}
