"""A call of `fit` timed up to a number of steps, as a script makes it."""

import keras
import numpy as np
import pytest

from tfopt.bench.timed_fit import WARMUP, timed_fit
from tfopt.errors import UnsupportedError
from tfopt.fit.launching import overlap_of

STEPS, BATCH = 20, 4
X = np.random.default_rng(0).normal(size=(BATCH * (WARMUP + STEPS + 5), 3)).astype("float32")
Y = X[:, :1] * 2


def made(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", **options)
    return model


class Seen(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])


def arguments(**more):
    return {"x": X, "y": Y, "batch_size": BATCH, "verbose": 0, "shuffle": False, "callbacks": None} | more


@pytest.mark.parametrize("together", [list, tuple, lambda callbacks: callbacks[0]])
def test_it_trains_as_the_script_does_up_to_that_step(together):
    whole, seen, model = Seen(), Seen(), made()
    made().fit(**arguments(callbacks=[whole]))
    found = timed_fit(keras.Model.fit, model, arguments(callbacks=together([seen])), STEPS, ())
    assert found["steps"] == len(seen.losses) == WARMUP + STEPS
    assert seen.losses == whole.losses[: WARMUP + STEPS]
    assert found["loss"] == whole.losses[WARMUP + STEPS - 1]
    assert int(model.optimizer.iterations) == WARMUP + STEPS
    assert len(found["times"]["repeats_ms"][0]) == 5


def test_causes_are_taken_away_before():
    model, seen = made(), []
    look = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.append(overlap_of(model) is not None))
    timed_fit(keras.Model.fit, model, arguments(callbacks=[look]), STEPS, ("fit waits for each step",))
    assert seen == [True]


def test_steps_of_one_execution_count_each():
    model = made(steps_per_execution=5)
    found = timed_fit(keras.Model.fit, model, arguments(), STEPS, ())
    assert found["steps"] == int(model.optimizer.iterations) == WARMUP + STEPS + 5  # to the end of an execution


def test_a_training_that_is_too_short_is_refused():
    steps = len(X) // BATCH
    with pytest.raises(UnsupportedError, match=rf"of {steps + 10} steps .* ended after {steps}\. Pass a smaller --st"):
        timed_fit(keras.Model.fit, made(), arguments(), steps + 10 - WARMUP, ())
