"""Nets with a fault of precision do not pass, and their like without it do."""

import pytest
from precision_matrix.cases import COMPUTED, PLANTED
from precision_matrix.judged import assert_judged_right, parameters


@pytest.mark.parametrize("case", parameters(COMPUTED, share=0.3))
def test_the_verdict_on_a_formula_is_right(case):
    assert_judged_right(case)


@pytest.mark.parametrize("case", parameters(PLANTED))
def test_the_verdict_is_right(case):
    assert_judged_right(case)
