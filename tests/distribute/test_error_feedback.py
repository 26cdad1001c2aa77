"""Compressed gradients with error feedback train as NumPy's: on two logical devices and in two processes."""

import functools
import itertools
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from compression_cases import CASES, FEW, OVERFLOWS, by_hand
from quick import SLOW, in_shares
from trained_apart import ended, start

from tfopt.distribute import Compression, LowRank, compress_gradients

WHERE = ["here", "workers0", "workers1"]


@pytest.fixture(scope="module")
def found(request, tmp_path_factory):
    """What a share of the cases became on two devices and in two processes."""
    folder = tmp_path_factory.mktemp("compressed")
    ended(start("compression_training.py", folder, "here", request.param))
    ended(start("compression_training.py", folder, "workers", request.param, workers=2))
    return {name: pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in WHERE}


@pytest.fixture(scope="module")
def truth():
    """Returns the weights of a case by hand."""

    @functools.cache
    def weights(name):
        keras.config.set_floatx("float64")
        try:
            return by_hand(CASES[name])
        finally:
            keras.config.set_floatx("float32")

    return weights


in_few = pytest.mark.parametrize("found", [SLOW], indirect=True, scope="module")


def shared(names):
    """Parameters for the share, the place and each of these cases."""
    rows = in_shares(itertools.product(WHERE, names), lambda where, name: name in FEW[where.rstrip("01")])
    return pytest.mark.parametrize(("found", "where", "name"), rows, indirect=["found"], scope="module")


@shared(CASES)
def test_weights_are_those_of_gradients_compressed_by_numpy(found, truth, where, name):
    trained = found[where][name]
    assert not isinstance(trained, str), trained
    for one, other in zip(trained["weights"], truth(name), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert trained["apart"] == 0


@in_few
@pytest.mark.parametrize("where", WHERE)
def test_the_bytes_are_those_of_the_tensors_exchanged(found, where):
    # Weights of 5 x 6, 6, 6 x 2 and 2 numbers.
    trained = found[where]["clipping"]
    assert set(trained["exchanged"]) >= {5, 6, 2}
    assert max(trained["exchanged"]) == 6
    assert trained["compression"] == Compression(2, (5 + 6 + 6 + 2 + 6 + 2) * 8, 50 * 8).to_dict()


@shared(OVERFLOWS)
def test_a_step_that_overflows_is_skipped(found, where, name):
    trained = found[where][name]
    assert trained["scale"] == 2**15 / 4  # one overflow in each epoch
    assert trained["apart"] == 0
    assert all(np.isfinite(weight).all() for weight in trained["weights"])


class Alone:
    """The traffic of a single replica."""

    def sum(self, values):
        """Returns what it gets."""
        return values


def steps(method, shape):
    """Exchanges five random gradients."""
    random = np.random.default_rng(0)
    kept = [[tf.Variable(value) for value in method.begin(tf.zeros(shape, "float64"), 1)]]
    for _ in range(5):
        gradient = random.normal(size=shape)
        yield gradient, method.exchange([tf.constant(gradient)], kept, Alone())[0].numpy(), kept[0]


def test_what_low_rank_leaves_out_is_sent_later():
    unsent, right = np.zeros((7, 4)), None
    for gradient, sent, kept in steps(LowRank(2), (7, 4)):
        if right is None:
            right = tf.random.stateless_normal([4, 2], [1, 0], dtype="float64").numpy()
        left, _ = np.linalg.qr((gradient + unsent) @ right)
        right = (gradient + unsent).T @ left
        np.testing.assert_allclose(sent, left @ right.T, atol=1e-12)
        assert np.linalg.matrix_rank(sent) == 2
        unsent = gradient + unsent - left @ right.T
        np.testing.assert_allclose(kept[0].numpy(), unsent, atol=1e-12)


@pytest.mark.parametrize(("shape", "kept"), [((3,), 0), ((2, 3), 0), ((3, 3, 4, 8), 2)])
def test_low_rank_leaves_small_weights_whole(shape, kept):
    assert len(LowRank(2).begin(tf.zeros(shape), 0)) == kept


def test_bad_arguments():
    with pytest.raises(TypeError, match="rank to be an integer"):
        LowRank(0.5)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"Expected a model with weights, for LowRank\(rank=1\)"):
        compress_gradients(model, LowRank(1))


def test_one_device_sends_nothing():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    compress_gradients(model, LowRank(1)).fit(np.ones((4, 2)), np.ones(4), verbose=0)
    assert model.optimizer.compression is None


def test_the_bytes_are_printed():
    shown = "gradients of 2 replicas: 216 bytes sent per update instead of 4,000"
    assert str(Compression(2, 216, 4000)) == shown
