"""Losses of users' own on two replicas: right, or refused by name; healthy ones are left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replica_losses_cases import HEALTHY, REFUSED, REPAIRED

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
# Statistics of a replica's part, or other random numbers, are others than those of the whole batch; so is rounding.
OTHERS = {"batch norm": 0.2, "dropout": 0.3, "add_loss of a norm": 0.01, "bfloat16": 1e-2, "float16": 1e-3}
NAMED = {
    "compute_loss with a mean": "OwnComputeLoss",
    "a mean of its own": "ByHand",
    "add_loss of a sum": "'penalty'",
    "Circle beside another": "Circle ('circle')",
}
LOGS = {"reduced by hand"}  # Keras does not know that this loss is a part of the whole one


@pytest.fixture(scope="module", params=["stock", "repaired"])
def found(request):
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [SUPPORT.parents[1], SUPPORT]))}
    run = subprocess.run(
        [sys.executable, SUPPORT / "replica_losses_cases.py", request.param],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return request.param, json.loads(run.stdout.splitlines()[-1])


def error(one, two):
    """The largest differences of a weight and of a log."""
    weights = max(np.abs(np.subtract(a, b)).max() for a, b in zip(one["weights"], two["weights"], strict=True))
    logs = max(np.abs(np.subtract(values, two["history"][key])).max() for key, values in one["history"].items())
    return float(weights), float(logs)


def test_two_replicas_compute_what_one_device_does_or_say_why_not(found):
    which, cases = found
    for name in REPAIRED:
        weights, logs = error(*cases[name])
        assert weights < 1e-6
        assert (logs < 1e-5) == (which == "repaired"), name
    for name in REFUSED:
        one, two = cases[name]
        assert "error" not in one
        if which == "repaired":
            assert two["error"].startswith("UnsupportedError: Expected "), name
        else:
            assert "error" in two or max(error(one, two)) > 1e-3, name
    if which == "stock":
        return
    for name in HEALTHY:
        weights, logs = error(*cases[name])
        limit = OTHERS.get(name, 1e-5)
        assert weights < limit, name
        assert logs < limit or name in LOGS, name
    for name, named in NAMED.items():
        assert named in cases[name][1]["error"]
