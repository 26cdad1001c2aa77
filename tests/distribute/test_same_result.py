"""Two replicas and two processes compute what one device does."""

import json

import numpy as np
import pytest
from distributed_cases import FEW, OF_WORKERS, SAME
from quick import SHARES, SLOW, in_shares
from trained_apart import distance, ended, start

# For weights.
LIMITS = {"float64": 1e-9, "float32": 1e-6, "mixed_float16": 1e-2}
REPLICAS = ["two replicas", "worker 0", "worker 1"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """The outcomes of a share of the cases, by where they were trained."""
    folder, share = tmp_path_factory.mktemp("trained"), request.param
    places = (("here", 0), ("workers", 2), ("alone", 0))
    ended(*(start("distributed_training.py", folder, where, share, workers=workers) for where, workers in places))
    here, *workers, alone = (
        json.loads((folder / f"{name}.json").read_text()) for name in ("here0", "workers0", "workers1", "alone0")
    )
    same = {
        "one device": here["one"],
        "two replicas": here["repaired"],
        "worker 0": workers[0]["repaired"],
        "worker 1": workers[1]["repaired"],
        "alone": alone["repaired"],
        "stock alone": alone["stock"],
        "stock": here["stock"],
        "stock workers": workers[0]["stock"],
    }
    if share == "rest":
        return same
    return same | {
        "by hand": [trained["by hand"] for trained in (here, *workers)],
        "one by hand": here["one by hand"],
        "refused": here["refused"],
    }


in_few = pytest.mark.parametrize("found", [SLOW], indirect=True, scope="module")
in_each = pytest.mark.parametrize("found", SHARES, indirect=True, scope="module")
PLACES = {"two replicas": "here", "worker 0": "workers", "worker 1": "workers", "alone": "alone"}


def of_stock(*names):
    """Parameters for the share and each of these cases."""
    rows = in_shares([(name,) for name in names], lambda name: name in FEW["here"])
    return pytest.mark.parametrize(("found", "name"), rows, indirect=["found"], scope="module")


@pytest.mark.parametrize(
    ("found", "where", "name"),
    in_shares(
        [
            (where, name)
            for where in PLACES
            for name, case in SAME.items()
            if case.same and (name in OF_WORKERS or where == "two replicas")
        ],
        lambda where, name: name in FEW[PLACES[where]],
    ),
    indirect=["found"],
    scope="module",
)
def test_weights_history_and_counters_are_those_of_one_device(found, where, name):
    one, several = found["one device"][name], found[where][name]
    assert "error" not in several
    limit = LIMITS[SAME[name].dtype] * (100 if "adam" in name and SAME[name].dtype == "float32" else 1)
    assert distance(one["weights"], several["weights"]) < limit
    assert (one["iterations"], one["scale"]) == (several["iterations"], several["scale"])
    if SAME[name].overflow_in is None:
        for key, values in one["history"].items():
            np.testing.assert_allclose(
                several["history"][key], values, rtol=max(limit, 1e-6) if limit > 1e-9 else limit
            )
    for key in set(one) & {"evaluated"}:
        assert several[key] == pytest.approx(one[key], rel=limit)
    if "predicted" in one:
        for key in ("predicted", "predicted at once"):
            np.testing.assert_allclose(several[key], one[key], atol=limit)


@in_each
@pytest.mark.parametrize("where", REPLICAS)
def test_it_trained_at_all(found, where):
    for name, outcome in found[where].items():
        assert outcome["iterations"] > 0, name
        if SAME[name].overflow_in is None and len(outcome["history"]["mae"]) > 1:
            assert outcome["history"]["mae"][-1] < outcome["history"]["mae"][0], name


@in_each
@pytest.mark.parametrize("where", REPLICAS)
def test_an_overflow_in_either_replica_skips_the_step_for_all(found, where):
    for name in {"overflow in the first", "overflow in the second"} & set(found[where]):
        assert (found[where][name]["iterations"], found[where][name]["scale"]) == (6, 2.0**13)


@in_few
def test_a_replica_without_examples_leaves_no_trace_in_batch_norm(found):
    for where in REPLICAS:
        weights = found[where]["batch norm, one example left"]["weights"]
        assert all(np.isfinite(weight).all() for weight in weights)
    stock = found["stock"]["batch norm, one example left"]["weights"]
    assert not all(np.isfinite(weight).all() for weight in stock)


@of_stock("one example left", "global_clipnorm", "mask, uneven tail", "mean with sample weight")
def test_stock_keras_computes_something_else(found, name):
    assert distance(found["one device"][name]["weights"], found["stock"][name]["weights"]) > 1e-4


@in_few
@pytest.mark.parametrize("name", ["accumulation, schedule", "filtered, adam"])
def test_stock_keras_computes_something_else_on_one_device_too(found, name):
    assert distance(found["one device"][name]["weights"], found["stock alone"][name]["weights"]) > 1e-4


@in_few
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("accumulation, schedule", "merge_call"),
        ("steps per execution", "placeholder"),
        ("jit", "located in device"),
        ("a step of one's own, batches that never split evenly", "AddN"),
    ],
)
def test_stock_keras_ends_with_an_error(found, name, says):
    assert says in found["stock"][name]["error"]


@in_few
def test_stock_keras_cannot_fit_in_several_processes(found):
    assert "unsupported type" in found["stock workers"]["mean with sample weight"]["error"]


@in_few
def test_jit_is_refused_where_replicas_need_each_other(found):
    for name in ("jit, synchronised batch norm", "jit, mask"):
        error = found["refused"][name]["error"]
        assert error.startswith("UnsupportedError: Expected a forward and backward pass that works without the other")


@in_few
def test_a_loss_that_is_one_number_for_the_batch_is_refused(found):
    error = found["refused"]["one number for the batch"]["error"]
    assert error.startswith("UnsupportedError: Expected a loss per example")


@in_few
def test_weights_overwritten_by_averages_are_refused(found):
    assert "ema_overwrite_frequency=3" in found["refused"]["overwritten by averages"]["error"]


@in_few
def test_a_custom_loop_trains_as_on_one_device(found):
    for weights in found["by hand"]:
        assert distance(found["one by hand"], weights) < 1e-6


@in_few
def test_stock_keras_overlooks_an_overflow(found):
    weights = found["stock"]["overflow in the second"]["weights"]
    assert not all(np.isfinite(weight).all() for weight in weights)
