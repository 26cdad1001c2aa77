import json

import keras
import numpy as np
import pytest
from trained_apart import ended, start

from tfopt import repairs
from tfopt.distribute import compress_gradients
from tfopt.errors import UnsupportedError


@pytest.fixture(scope="module")
def found():
    return json.loads(ended(start("compressed_training.py")).splitlines()[-1])


def drift(one, other):
    """The distance between two trainings' weights, relative to their norm."""
    one, other = np.array(one["weights"]), np.array(other["weights"])
    return np.linalg.norm(one - other) / np.linalg.norm(one)


@pytest.mark.campaign
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_sent_in_16_bits(found, dtype):
    assert found[dtype]["plain"]["sent"] == found[dtype]["clipped"]["sent"] == [dtype]
    assert found["None"]["plain"]["sent"] == ["float32"]


@pytest.mark.campaign
@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1e-2), ("float16", 1e-3)])
@pytest.mark.parametrize("kind", ["plain", "clipped"])
def test_the_training_drifts_a_little(found, dtype, limit, kind):
    full, short = found["None"][kind], found[dtype][kind]
    assert 0 < drift(full, short) < limit
    assert short["loss"][-1] < short["loss"][0]


@pytest.mark.campaign
def test_the_rows_of_an_embedding_stay_in_32_bits(found):
    assert found["rows"]["short"]["sent"] == ["bfloat16", "float32"]
    assert 0 < drift(found["rows"]["long"], found["rows"]["short"]) < 1e-2


@pytest.mark.campaign
def test_on_one_device_nothing_is_rounded(found):
    assert found["one device"]["plain"]["sent"] == ["float32"]
    assert drift(found["None"]["plain"], found["one device"]["plain"]) < 1e-6


@pytest.mark.campaign
def test_the_strategy_of_two_devices(found):
    assert "mirrored on CPU:0, CPU:1" in found["explain"]
    assert found["again"]
    assert sorted(found["repaired"]) == sorted(repairs.REPLICAS)


def net(**options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    if options:
        model.compile(loss="mse", **options)
    return model


def test_bad_arguments():
    with pytest.raises(TypeError, match=r"keras\.Model"):
        compress_gradients("model")
    with pytest.raises(
        ValueError, match=r"Expected a LowRank, or .*'bfloat16' or 'float16'\. Received: 'bfloat'.*Did you mean"
    ):
        compress_gradients(net(optimizer="sgd"), "bfloat")
    with pytest.raises(ValueError, match=r"Call model\.compile first"):
        compress_gradients(net())


def test_an_optimizer_with_an_all_reduce_of_its_own_is_refused():
    class Own(keras.optimizers.SGD):
        def _all_reduce_sum_gradients(self, grads_and_vars):
            return grads_and_vars

    with pytest.raises(UnsupportedError, match="Found Own"):
        compress_gradients(net(optimizer=Own()))


def test_the_inner_optimizer_of_a_loss_scale_is_the_one():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    compress_gradients(net(optimizer=optimizer))
    assert "_all_reduce_sum_gradients" in optimizer.inner_optimizer.__dict__
