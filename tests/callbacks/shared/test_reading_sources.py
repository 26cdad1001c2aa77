"""Whoever uses readings finds their source in fit's list, or adds it."""

import copy
import dataclasses
import gc
import math
import pickle
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, small_net

from tfopt.callbacks import ThroughputLogger
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, Listeners, find_source, finite
from tfopt.callbacks.shared.running_fit import Callback
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS
from tfopt.hardware import GpuSample
from tfopt.warn import forget_warnings


class User(Callback):
    """Asks for a ThroughputLogger, and keeps what it is told."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_train_begin(self, logs=None):
        self.source = find_source(ThroughputLogger, self)
        self.source.listeners.add(self.take)

    def take(self, row):
        self.told.append(row)


def fit(*callbacks, epochs=1):
    return small_net().fit(*batch(16), batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


@pytest.mark.slow
@pytest.mark.parametrize("position", [0, 1])
def test_the_one_in_the_list_is_found_wherever_it_stands(position):
    user, logger = User(), ThroughputLogger()
    others = [user]
    others.insert(position, logger)
    assert "step_time_ms" in fit(*others)
    assert user.source is logger
    assert user.told[-1]["step"] == 2


def test_without_one_it_is_added_and_leaves_no_trace(tmp_path):
    """Warnings are errors here: that of a logger before the added one would end fit."""
    one, other = User(), User()
    history = fit(one, other, keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    assert one.source is other.source
    assert one.told == other.told != []
    assert {"epoch", "step", *THROUGHPUT_KEYS} <= set(one.told[0])
    assert "step_time_ms" not in history
    assert "step_time_ms" not in (tmp_path / "log.csv").read_text()


def test_a_list_of_ones_own_gets_one_once():
    user, model = User(), small_net()
    running = keras.callbacks.CallbackList([user], model=model, add_history=True)
    for _ in range(2):
        model.fit(*batch(16), batch_size=8, verbose=0, callbacks=running)
    assert [type(callback).__name__ for callback in running.callbacks].count("ThroughputLogger") == 1
    assert len(user.told) >= 2


def test_a_listener_that_fails_is_reported_once_and_the_others_are_told(caplog):
    class Broken:
        def take(self, row):
            raise RuntimeError("planted")

    forget_warnings()
    listeners, broken, user = Listeners(), Broken(), User()
    for one in (broken, user):
        listeners.add(one.take)
    listeners("first")
    listeners("second")
    assert user.told == ["first", "second"]
    assert [record.message for record in caplog.records] == [
        "Expected test_a_listener_that_fails_is_reported_once_and_the_others_are_told.<locals>.Broken.take to take a "
        "reading. Found: RuntimeError('planted'). The training goes on without it."
    ]
    forget_warnings()


def test_listeners_are_told_once_and_not_kept_alive():
    listeners, user = Listeners(), User()
    listeners.add(user.take)
    listeners.add(user.take)
    listeners("a")
    listeners.remove(user.take)
    listeners("b")
    assert user.told == ["a"]
    listeners.add(user.take)
    del user
    gc.collect()
    listeners("c")  # nobody is left
    assert copy.deepcopy(listeners)._methods == pickle.loads(pickle.dumps(listeners))._methods == ()


def test_every_number_of_a_sample_has_its_place():
    other = {"time_seconds", "elapsed_seconds", "index", "uuid", "throttle_reasons"}
    assert {*GPU_KEYS, *HOST_KEYS} | other == {field.name for field in dataclasses.fields(GpuSample)}


def test_finite_numbers():
    values = {"int": 1, "float": 0.5, "numpy": np.float32(0.25), "nan": math.nan, "inf": -math.inf, "text": "1"}
    assert finite({**values, "none": None, "list": [1], "tensor": tf.constant(1.0)}) == {
        "int": 1.0,
        "float": 0.5,
        "numpy": 0.25,
    }


def test_numbers_beyond_floats_and_names_that_are_no_texts():
    assert finite({"huge": 10**400, "share": Fraction(10**400, 3), 7: 1, ("a", 1): 2}) == {"7": 1.0, "('a', 1)": 2.0}
