"""A training that is interrupted and goes on ends as one that was not: weights, optimizer, metrics and history."""

import pytest
from resumed_fits import CASES, MOMENTS, difference

_QUICK = {("arrays", "within an epoch"), ("plateau", "in the validation"), ("pipeline", "at an epoch's last step")}
_ALL = [(case, moment) for case in CASES for moment in MOMENTS]


def _marked(number, case, moment):
    # The slow ones hold each case once, at one moment after the other.
    slow = number % len(MOMENTS) == number // len(MOMENTS) % len(MOMENTS)
    marks = [] if (case, moment) in _QUICK else [pytest.mark.slow if slow else pytest.mark.campaign]
    return pytest.param(case, moment, marks=marks)


@pytest.mark.parametrize(("case", "moment"), [_marked(number, *each) for number, each in enumerate(_ALL)])
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_ends_as_one_that_was_not_interrupted(tmp_path, case, moment):
    assert difference(CASES[case], tmp_path, MOMENTS[moment]) is None
