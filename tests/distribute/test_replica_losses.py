"""Losses of users' own on two replicas, in one process and in two: right or refused by name; healthy ones trained."""

import functools
import json

import numpy as np
import pytest
from quick import SHARES
from replica_losses_cases import HEALTHY, REFUSED, REPAIRED
from trained_apart import ended, start

# Statistics of a replica's part, or other random numbers, are others than those of the whole batch; so is rounding.
OTHERS = {
    "batch norm": 0.2,
    "dropout": 0.3,
    "add_loss of a norm": 0.01,
    "a gradient inside the loss": 0.01,
    "bfloat16": 1e-2,
    "float16": 1e-3,
}
NAMED = {
    "compute_loss and L2 by hand": "replica_losses_cases.py, line",
    "add_loss of a sum in training": "'penalty'",
    "compute_loss with a mean": "OwnComputeLoss",
    "a mean of its own": "ByHand",
    "add_loss of a sum": "'penalty'",
    "Circle beside another": "Circle ('circle')",
}
# A constant is logged as if it were a part of the whole loss; of an eager loss by hand, nobody knows that it is.
LOGS = {"compute_loss and a constant", "compute_loss and a stopped term", "the mean over all examples, eager"}


@functools.cache
def here(which, share):
    """On one device and on two logical ones."""
    return json.loads(ended(start("replica_losses_cases.py", which, share)).splitlines()[-1])


def workers(share, folder):
    """On one device and in two processes."""
    path = folder / "found.json"
    ended(start("replica_losses_cases.py", "workers", share, path, workers=2))
    # The two trainings have other shares: what is left of the one is not all that is left of the other.
    alone = here("repaired", "few") | (here("repaired", "rest") if share == "rest" else {})
    return {name: (alone[name][0], together) for name, together in json.loads(path.read_text()).items()}


def of(names, cases):
    """Those of the names that a share has trained."""
    return [name for name in names if name in cases]


@pytest.fixture(params=["stock", "repaired", "workers"])
def found(request, share, tmp_path):
    if request.param == "workers":
        return "repaired", workers(share, tmp_path)
    return request.param, here(request.param, share)


def error(one, two):
    """The largest differences of a weight and of a log."""
    weights = max(np.abs(np.subtract(a, b)).max() for a, b in zip(one["weights"], two["weights"], strict=True))
    logs = max(np.abs(np.subtract(values, two["history"][key])).max() for key, values in one["history"].items())
    return float(weights), float(logs)


@pytest.mark.parametrize("share", SHARES)
def test_two_replicas_compute_what_one_device_does_or_say_why_not(found):
    which, cases = found
    for name in of(REPAIRED, cases):
        weights, logs = error(*cases[name])
        assert weights < 1e-6
        assert (logs < 1e-5) == (which == "repaired"), name
    for name in of(REFUSED, cases):
        one, two = cases[name]
        assert "error" not in one
        if which == "repaired":
            assert two["error"].startswith("UnsupportedError: Expected "), name
        else:
            assert "error" in two or not all(each < 1e-3 for each in error(one, two)), name  # or NaN
    if which == "stock":
        return
    for name in of(HEALTHY, cases):
        weights, logs = error(*cases[name])
        limit = OTHERS.get(name, 1e-5)
        assert weights < limit, name
        assert logs < limit or name in LOGS, name
    for name in of(NAMED, cases):
        assert NAMED[name] in cases[name][1]["error"]
