"""A sharded optimizer trains as the plain one: on two logical devices and in two processes."""

import itertools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import SHARES, SLOW, in_shares
from sharded_cases import CASES, FEW, SAVED
from trained_apart import distance, ended, start
from versions import since_keras

from tfopt.distribute import shard_optimizer
from tfopt.distribute.sharded_optimizer import _gathered
from tfopt.errors import UnsupportedError

WHERE = ["here", "worker0", "worker1"]
FILES = {"here": "here.weights.h5", "workers": "worker0.weights.h5"}
# TensorFlow computes 1/sqrt(x) differently in the last bit depending on where x stands in its tensor.
LIMITS = {"RMSprop": 1e-6, "Adagrad": 1e-6, "Adadelta": 1e-6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(request, folder):
    """What a share of the cases became on two devices and in two processes; the few then go on on three devices."""
    share, script = request.param, "sharded_training.py"
    ended(start(script, folder, 2, share), start(script, folder, 0, share, workers=2))
    if share == "few":
        ended(start(script, folder, 3, share))
    names = [*WHERE, "three"] if share == "few" else WHERE
    return {name: pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in names}


in_few = pytest.mark.parametrize("found", [SLOW], indirect=True, scope="module")
in_both = pytest.mark.parametrize("found", SHARES, indirect=True, scope="module")


@pytest.mark.parametrize(
    ("found", "where", "name"),
    in_shares(itertools.product(WHERE, CASES), lambda where, name: name in FEW[where.rstrip("01")]),
    indirect=["found"],
    scope="module",
)
def test_weights_and_state_are_those_of_the_plain_optimizer(found, where, name):
    assert not isinstance(found[where][name], str), found[where][name]
    plain, sharded = found[where][name]
    assert distance(plain["weights"], sharded["weights"]) <= LIMITS.get(name, 0)
    assert distance(plain["state"], sharded["state"]) <= LIMITS.get(name, 0)
    assert plain["scale"] == sharded["scale"]
    assert all(np.isfinite(weight).all() for weight in sharded["weights"])


@in_both
def test_both_workers_have_the_same_weights(found):
    for name in set(CASES) & set(found["worker0"]):
        assert distance(*(found[worker][name][1]["weights"] for worker in ("worker0", "worker1"))) == 0, name


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_each_replica_keeps_half_of_the_state(found, where):
    plain, sharded = found[where]["Adam"]
    scalars = 8 + 4  # the step count and the learning rate
    assert sum(plain["local"]) == 2 * 4 * 50 + scalars
    assert sum(sharded["local"]) == 4 * 50 + scalars
    assert sharded["sharding"]["state_bytes"] == sum(sharded["local"]) - scalars
    assert sharded["sharding"]["unsharded_state_bytes"] == sum(plain["local"]) - scalars


@in_few
def test_the_bytes_sent_are_those_that_the_network_counts(found):
    sent = found["worker0"]["sent"]
    if sent[True] is None:
        pytest.skip("this machine does not count the bytes of its network")
    # The loopback interface counts both processes, and each message's headers.
    assert sent[False] / 2 == pytest.approx(sent["said"]["unsharded_sent_bytes"], rel=0.03)
    assert sent[True] / 2 == pytest.approx(sent["said"]["sent_bytes"], rel=0.03)


@in_few
@pytest.mark.parametrize("saved_by", FILES)
def test_three_replicas_go_on_from_the_files_of_two(found, saved_by):
    three, two = found["three"][FILES[saved_by]], found["worker0" if saved_by == "workers" else "here"]["saved"]
    assert distance(three["weights"], two["weights"]) < 1e-4  # sums over other numbers of replicas, through Adam


@in_few
@pytest.mark.parametrize("saved_by", FILES)
def test_a_plain_optimizer_reads_the_files(found, folder, saved_by):
    model = SAVED()
    model.optimizer.build(model.trainable_variables)
    model.load_weights(folder / FILES[saved_by])
    state = [variable.numpy() for variable in model.optimizer.variables]
    assert distance(state, found["three"][FILES[saved_by]]["loaded"]) == 0
    assert sum(np.abs(part).sum() for part in state) > 0
    model.fit(SAVED.dataset(), epochs=1, verbose=0, shuffle=False)
    two = found["worker0" if saved_by == "workers" else "here"]["saved"]
    assert distance(model.get_weights(), two["weights"]) < 1e-4
    whole = keras.saving.load_model(folder / FILES[saved_by].replace(".weights.h5", ".keras"))
    assert type(whole.optimizer) is keras.optimizers.Adam
    assert distance([variable.numpy() for variable in whole.optimizer.variables], state) == 0


def test_on_one_device_nothing_changes():
    optimizer = keras.optimizers.Adam(0.01)
    assert shard_optimizer(optimizer) is optimizer
    assert shard_optimizer(optimizer) is optimizer
    with pytest.raises(ValueError, match="which is not built"):
        _ = optimizer.sharding
    weight = keras.Variable(np.ones(3, "float32"))
    optimizer.apply([np.ones(3, "float32")], [weight])
    np.testing.assert_allclose(weight.numpy(), 0.99, rtol=1e-6)
    assert optimizer.sharding.to_dict() == {
        "replicas": 1,
        "state_bytes": 24,
        "unsharded_state_bytes": 24,
        "sent_bytes": 0,
        "unsharded_sent_bytes": 0,
    }
    assert str(optimizer.sharding).startswith(
        "optimizer state divided by 1: 24 bytes per replica instead of 24; 0 bytes"
    )


def test_gradients_of_a_repeated_id_are_summed_before_they_are_squared():
    table = keras.Variable(np.ones((2, 1), "float32"))
    optimizer = shard_optimizer(keras.optimizers.Adagrad(1.0, initial_accumulator_value=0.0, epsilon=1e-12))
    gradient = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([1, 1]), tf.constant([2, 1]))
    optimizer.apply([gradient], [table])
    assert table.numpy()[1] == pytest.approx(0.0, abs=1e-6)  # 1 - 7 / sqrt(7 ** 2), not 1 - 7 / sqrt(3 ** 2 + 4 ** 2)


def test_weights_of_two_dtypes_are_gathered_apart():
    weights = [tf.Variable([1.0, 2.0]), tf.Variable([3.0], dtype="float64"), tf.Variable([[4.0]])]
    parts = [tf.reshape(weight, [-1]) + 1 for weight in weights]
    gathered = _gathered(tf.distribute.get_replica_context(), parts, weights)
    assert [(part.dtype.name, part.numpy().tolist()) for part in gathered] == [
        ("float32", [2.0, 3.0]),
        ("float64", [4.0]),
        ("float32", [[5.0]]),
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(("Lamb", "norm of each whole"), ("Muon", "whole matrices"), ("Adafactor", "rows")),
        pytest.param("ScheduleFreeAdamW", "copy", marks=since_keras("3.14")),
    ],
)
def test_optimizers_of_whole_weights_are_refused_by_name(name, why):
    with pytest.raises(UnsupportedError, match=f"Found {name}, which .*{why}"):
        shard_optimizer(getattr(keras.optimizers, name)())


def test_bad_arguments():
    class Own(keras.optimizers.Adam):
        pass

    with pytest.raises(TypeError, match=r"Received str: 'adam'"):
        shard_optimizer("adam")
    with pytest.raises(UnsupportedError, match="Found Own, which may compute with whole weights"):
        shard_optimizer(keras.optimizers.LossScaleOptimizer(Own()))
    built = keras.optimizers.Adam()
    built.build([keras.Variable([1.0])])
    with pytest.raises(ValueError, match="Call shard_optimizer before compile"):
        shard_optimizer(built)
