"""Architectures of keras.applications, and of KerasHub where it is installed, pass the gate."""

import pytest
from precision_matrix.cases import PUBLISHED
from precision_matrix.judged import assert_judged_right, parameters


@pytest.mark.parametrize("case", parameters(PUBLISHED))
def test_the_verdict_is_right(case):
    assert_judged_right(case)
