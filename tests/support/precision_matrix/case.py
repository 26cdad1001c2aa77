"""A case of the matrix: a model, a policy and the verdict that is right, with its ground."""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras

from precision_matrix.structures import share_of_wrong_ids
from tfopt.precision import apply, check

HALVES = ("mixed_float16", "mixed_bfloat16")
RECORD = Path(__file__).with_name("both_ways.json")
RECORDS = json.loads(RECORD.read_text()) if RECORD.exists() else {}
"""By case: the loss of the first epoch in float32, and of the last in float32 and under the policy."""
EXAMPLES = 32
"""Of the data, in the batch that is checked."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model under one policy."""

    name: str
    make: Callable[[], tuple[keras.Model, Any]]
    """Returns a compiled model and its data, in arrays: (x, y[, sample_weight])."""
    policy: Any
    verdict: str
    """"pass", "fail", or "refuse" for an error that says what to do instead; "by ids" compares those looked up."""
    truth: str | None = None
    """How the verdict is known without the gate; None if both_ways.py finds out by training both ways."""
    names: tuple[str, ...] = ()
    """Layers to be named in the problems, or words of the error."""
    made_under: str = "float32"
    """The global policy that the model is made under."""

    @property
    def id(self) -> str:
        asked = self.policy if isinstance(self.policy, str) else "as it stands" if not self.policy else "mapping"
        made = "" if self.made_under == "float32" else f", made under {self.made_under}"
        return f"{self.name}, {asked}{made}".replace("mixed_", "")

    @property
    def ground(self) -> str:
        trained = "trained both ways, as both_ways.json holds" if self.id in RECORDS else "healthy by its construction"
        return self.truth or trained

    def build(self, seed: int = 1) -> tuple[keras.Model, Any]:
        """The model and all its data."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.made_under)
        try:
            keras.utils.set_random_seed(seed)
            return self.make()
        finally:
            keras.config.set_dtype_policy(before)


@dataclass(frozen=True)
class Finding:
    """What `check` made of a case."""

    expected: str
    """"pass", "fail", "refuse", or "fail or refuse"."""
    verdict: str
    """"pass", "fail", "refuse", or "crash" for an error of another kind than tfopt's."""
    outcome: str
    """"right", "wrong pass", "wrong refusal", "crash" (also an error in place of a verdict, or a verdict on what cannot
    be judged), "no cause" (a verdict without the layer or words)."""
    said: str


def first(data: Any, count: int) -> Any:
    """The first examples of nested arrays."""
    if isinstance(data, dict):
        return {key: first(value, count) for key, value in data.items()}
    if isinstance(data, (tuple, list)):
        return type(data)(first(value, count) for value in data)
    return data[:count]


def run(case: Case) -> Finding:
    """Checks the case's model on one batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's and Keras' own, of planted values
        return _run(case)


def _run(case: Case) -> Finding:
    model, data = case.build()
    expected = case.verdict if case.verdict != "by ids" else _verdict_by_ids(case)
    try:
        report = check(model, first(data, EXAMPLES), case.policy)
    except Exception as error:
        said = blamed = f"{type(error).__name__}: {error}"
        # tfopt's own errors begin like this.
        verdict = "refuse" if str(error).startswith("Expected") else "crash"
    else:
        said, blamed = str(report), " ".join(report.problems)
        verdict = "pass" if report.passed else "fail"
    named = verdict == "pass" or all(name in blamed for name in case.names)
    return Finding(expected, verdict, _outcome(expected, verdict, named), said)


def _outcome(expected: str, verdict: str, named: bool) -> str:
    if verdict == "pass" != expected:
        return "wrong pass"
    if expected == "pass" != verdict != "crash":
        return "wrong refusal"
    if verdict not in expected.split(" or "):
        return "crash"
    return "right" if named else "no cause"


def _verdict_by_ids(case: Case) -> str:
    """Whether the embedding gets the batch's ids, as the model stands and once the policy is applied."""
    model, (x, _) = case.build()
    shares = [share_of_wrong_ids(model, x)]
    apply(model, case.policy)
    return "fail" if any([*shares, share_of_wrong_ids(model, x)]) else "pass"
