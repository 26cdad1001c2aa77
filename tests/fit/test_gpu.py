"""What only a GPU can show: where the batches lie, how far the host runs ahead, and that it trains the same."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fitting import X, Y, dataset, dense_net

from tfopt import fit
from tfopt.fit.launching import overlap_of
from tfopt.fit.overlapping import ahead

pytestmark = pytest.mark.gpu


def test_batches_lie_on_the_device():
    for batch in ahead(dataset(), jit=True):
        assert all("GPU:0" in part.device for part in batch)


@pytest.mark.parametrize("jit", [False, True])
def test_int32_parts_lie_where_the_step_takes_them(jit):
    labels = Y.astype("int32")
    batches = list(ahead(dataset(y=labels), jit=jit))
    assert np.concatenate([y for _, y in batches]).tolist() == labels.tolist()
    for x, y in batches:
        assert "GPU:0" in x.device
        assert ("GPU:0" in y.device) is jit


@pytest.mark.parametrize("jit", [False, True])
def test_it_trains_the_same(jit):
    losses = []
    for overlapped in (False, True):
        keras.utils.set_random_seed(0)
        model = dense_net(jit_compile=jit)
        if overlapped:
            fit.overlap(model, steps_in_flight=3)
        losses.append(model.fit(X, Y, batch_size=4, epochs=3, verbose=0).history["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_the_host_runs_ahead_and_not_too_far():
    """Steps of some milliseconds are launched in less, until the bound is reached."""

    class Slow(keras.layers.Layer):
        def call(self, inputs):
            matrix = tf.ones((4096, 4096)) * tf.reduce_mean(inputs)
            for _ in range(20):
                matrix = matrix @ matrix * 1e-4
            return inputs + 0 * tf.reduce_mean(matrix)

    class Ahead(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            marks = overlap_of(self.model).in_flight._marks
            self.out = max(getattr(self, "out", 0), sum(not mark.done() for mark in marks))

    model = keras.Sequential([keras.Input((8,)), Slow(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=True)
    watch = Ahead()
    fit.overlap(model, steps_in_flight=4)
    model.fit(np.zeros((64, 8)), np.zeros((64, 1)), batch_size=2, verbose=0, callbacks=[watch])
    assert watch.out == 1  # of two marks, one is waited for
