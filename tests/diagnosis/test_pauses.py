"""What training loses between its steps."""

import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.diagnosis import diagnose_fit, pauses
from tfopt.diagnosis.pauses import EpochEnds, epoch_ends, epoch_starts, retracing
from tfopt.diagnosis.training import Training

STEPS = 12


def made():
    model = keras.Sequential([keras.Input((None, 8)), *(keras.layers.Dense(8, activation="tanh") for _ in range(4))])
    model.compile("adam", "mse", jit_compile=True)
    return model


def of_lengths(lengths):
    batches = [np.ones((4, length, 8), "float32") for length in lengths]
    signature = (tf.TensorSpec((4, None, 8), tf.float32),) * 2
    return tf.data.Dataset.from_generator(lambda: ((x, x) for x in batches), output_signature=signature)


def seconds(model, data):
    started = time.perf_counter()
    model.fit(data, verbose=0, shuffle=False)
    return time.perf_counter() - started


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("lengths", [range(2, 2 + STEPS), [2, 3, 4] + [2] * (STEPS - 3)], ids=["each step", "some"])
def test_new_shapes_cost_what_a_first_fit_takes_more_than_a_second(lengths, monkeypatch):
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # of this process alone, however busy the machine
    model, data = made(), of_lengths(lengths)
    training = Training.of(model, {"x": data, "steps_per_epoch": STEPS})
    with training.untouched():
        found = retracing(training, STEPS)
    assert (found.times, found.steps) == (len(set(lengths)) - 1, STEPS)
    other = made()
    other.fit(of_lengths([2]), verbose=0, shuffle=False)  # the first shape does not count
    more = seconds(other, data) - seconds(other, data)
    assert more / 2 < found.seconds < 2 * more


@pytest.mark.slow
def test_endless_data_are_opened_once_and_not_read_to_their_end():
    data = tf.data.Dataset.from_tensors((np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))).repeat()
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = diagnose_fit(model, {"x": data, "steps_per_epoch": 6, "epochs": 3}, steps=5)
    assert "epoch starts" not in {cause.name for cause in found.causes}


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_data_that_are_slow_to_open_cost_that_in_each_epoch(steps_per_execution):
    def slow_to_open():
        time.sleep(0.3)
        for _ in range(6):
            yield np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    signature = tf.TensorSpec((4, 2), tf.float32), tf.TensorSpec((4, 1), tf.float32)
    data = tf.data.Dataset.from_generator(slow_to_open, output_signature=signature)
    data = data.apply(tf.data.experimental.assert_cardinality(6))
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", steps_per_execution=steps_per_execution)
    training = Training.of(model, {"x": data})
    with training.untouched():
        opened, once = epoch_starts(training, 6)
    assert len(opened) == len(once) == 6
    assert min(opened) >= 0.3


@pytest.mark.slow
def test_what_comes_between_epochs_is_compared_with_the_steps_beside_it(monkeypatch):
    now = [0]
    monkeypatch.setattr(pauses, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Saves(keras.callbacks.Callback):
        """Takes seconds of that clock; the first step and the first batch take more, as they open the data."""

        def on_train_batch_end(self, batch, logs=None):
            now[0] += 2 if batch else 50

        def on_epoch_end(self, epoch, logs=None):
            now[0] += 10
            self.model.stop_training = True  # as one does that has seen enough

        def on_test_batch_end(self, batch, logs=None):
            now[0] += 4 if batch else 50

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x, y = np.ones((48, 2), "float32"), np.ones((48, 1), "float32")
    callback = Saves()
    training = Training.of(model, {"x": x, "y": y, "batch_size": 4, "validation_data": (x, y), "callbacks": callback})
    with training.untouched():
        found = epoch_ends(training, {callback: "callback Saves"}, 6)
    assert found == EpochEnds(
        [2] * 5, {"callback Saves": dict.fromkeys(pauses._EPOCH_HOOKS, [0] * 5) | {"on_epoch_end": [10] * 5}}, [4] * 5
    )
    assert EpochEnds([0.02, 0.04, 0.02], {}, []).in_steps([0.1, 0.2, 0.12]) == pytest.approx((5, 5, 6))
