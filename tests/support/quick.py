"""Thins out parametrised tests: a few cases stand for all in the default run, and the others are slow."""

import pytest


def first_quick(values, count=1):
    """Returns pytest parameters, all but the first `count` marked slow. A tuple is a row of several arguments."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=[pytest.mark.slow] * (at >= count)) for at, row in enumerate(rows)]
