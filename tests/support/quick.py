"""Thins out parametrised tests: a few cases stand for all in the default run, more are slow, the rest is a campaign."""

import pytest

SLOW = pytest.param("few", marks=pytest.mark.slow)
"""The share of the cases that the slow tests train, as the parameter of a fixture."""
SHARES = [SLOW, pytest.param("rest", marks=pytest.mark.campaign)]
"""That share, and the one of the campaign."""


def first_quick(values, count=1, *, every=1):
    """Returns pytest parameters, all but the first `count` marked slow. A tuple is a row of several arguments.

    With `every`, only each such one is slow and the rest is a campaign. In a table that is a product, take a number
    that shares no divisor with the lengths of its columns: then the slow rows hold each value of each column.
    """
    return [pytest.param(*_row(value), marks=_marks(at, count, every)) for at, value in enumerate(values)]


def campaign(values):
    """Returns pytest parameters, all of a campaign."""
    return [pytest.param(*value, marks=pytest.mark.campaign) for value in map(_row, values)]


def _row(value):
    return value if isinstance(value, tuple) else (value,)


def _marks(at, count, every):
    if at < count:
        return []
    return [pytest.mark.campaign if (at - count) % every else pytest.mark.slow]


def in_shares(rows, is_few):
    """Returns pytest parameters that begin with the share a row is trained in: slow ones in "few", others in "rest"."""
    return [pytest.param(*SHARES[not is_few(*row)].values, *row, marks=SHARES[not is_few(*row)].marks) for row in rows]
