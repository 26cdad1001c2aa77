"""What the tests of the matrix share: a pytest parameter for each case, and the comparison of its verdict."""

import importlib.util
import random

import pytest

from precision_matrix.case import run
from precision_matrix.cases import OF_HUB

DISPUTED = {
    "quantised_codes, bfloat16": "one row of 32 gets another code; distances belong into float32",
    "normalisations after training, bfloat16": "a converged power iteration moves by its rounding, without drift",
}
"""Healthy cases that are refused all the same, on some processors, and why: at most two."""
QUICK = (
    "mlp, float16",
    "encoder, bfloat16",
    "stochastic_depth, float16",
    "augmented, bfloat16",
    "augmented_colours, bfloat16",
    "positions of 1,024, bfloat16",
    "rotary positions of 1,024, bfloat16",
    "years, bfloat16",
    "mask of -1e9 that is added, float16",
    "ids below 5000 without an Input, as it stands, made under bfloat16",
    "ids below 5000 without an Input, bfloat16, made under bfloat16",
    "softmax by operation, as it stands, made under bfloat16",
    "faint gradient, not scaled, float16",
    "GAN, float16",
    "counter, bfloat16",
    "one weight of 16 bits, as it stands, made under bfloat16",
    "Dense on a sequence, bfloat16",
    "Dense on a sequence, Adam, bfloat16",
    "clip, float16",
    "own step, clips what is scaled, float16",
)
"""Cases of the default run."""


SHARE = 0.1
"""Of the others, those that are slow; the rest is a campaign. Drawn by a fixed seed."""


def parameters(cases, share=SHARE):
    drawn = random.Random(0)
    return [pytest.param(case, id=case.id, marks=_marks(case, drawn.random() < share)) for case in cases]


def _marks(case, slow):
    marks = [] if case.id in QUICK else [pytest.mark.slow if slow else pytest.mark.campaign]
    if case in OF_HUB and importlib.util.find_spec("keras_hub") is None:
        how = "pip install --no-deps keras-hub && pip install tokenizers sentencepiece regex kagglehub"
        marks.append(pytest.mark.skip(reason=f"needs KerasHub: {how}"))
    return marks


def assert_judged_right(case):
    found = run(case)
    allowed = {"right", "wrong refusal"} if case.id in DISPUTED else {"right"}
    assert found.outcome in allowed, f"{found.outcome}; right is {case.verdict} ({case.ground})\n{found.said}"
