"""What the tests of the matrix share: a pytest parameter for each case, and the comparison of its verdict."""

import pytest

from precision_matrix.case import run

DISPUTED = {
    "quantised_codes, bfloat16": "one row of 32 gets another code; distances belong into float32",
    "normalisations after training, bfloat16": "a converged power iteration moves by its rounding, without drift",
}
"""Healthy cases that are refused all the same, and why: at most two."""
QUICK = (
    "mlp, float16",
    "encoder, bfloat16",
    "stochastic_depth, float16",
    "positions of 1,024, bfloat16",
    "years, bfloat16",
    "mask of -1e9 that is added, float16",
    "softmax by operation, as it stands, made under bfloat16",
    "faint gradient, not scaled, float16",
    "GAN, float16",
)
"""Cases of the default run."""


def parameters(cases):
    return [pytest.param(case, id=case.id, marks=[pytest.mark.slow] * (case.id not in QUICK)) for case in cases]


def assert_judged_right(case):
    found = run(case)
    expected = "wrong refusal" if case.id in DISPUTED else "right"
    assert found.outcome == expected, f"{found.outcome}; right is {case.verdict} ({case.ground})\n{found.said}"
