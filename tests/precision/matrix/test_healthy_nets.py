"""Nets that train under 16 bits as in float32 pass the gate."""

import pytest
from precision_matrix.cases import HEALTHY
from precision_matrix.judged import assert_judged_right, parameters


@pytest.mark.slow
@pytest.mark.parametrize("case", parameters(HEALTHY))
def test_the_verdict_is_right(case):
    assert_judged_right(case)
