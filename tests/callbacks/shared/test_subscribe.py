import dataclasses
import math
from fractions import Fraction

import keras
import numpy as np
import pytest
import tensorflow as tf
from watched_fit import fit, net

from tfopt.callbacks import ThroughputLogger
from tfopt.callbacks.shared.reading_sources import THROUGHPUT_KEYS, finite
from tfopt.callbacks.shared.running_fit import steps_trained
from tfopt.causes.readings import GPU_KEYS, HOST_KEYS
from tfopt.hardware import GpuSample


def test_every_number_of_a_sample_has_its_place():
    other = {"time_seconds", "elapsed_seconds", "index", "uuid", "throttle_reasons"}
    assert {*GPU_KEYS, *HOST_KEYS} | other == {field.name for field in dataclasses.fields(GpuSample)}


def test_throughput_logger_tells_these_keys():
    class Listens(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.rows = []
            logger.listeners.add(self.rows_taken)

        def rows_taken(self, row):
            self.rows.append(row)

    logger, listens = ThroughputLogger(), Listens()
    fit(logger, listens)
    assert {"epoch", "step"} <= set(listens.rows[0])
    assert set(THROUGHPUT_KEYS) <= set(listens.rows[0])


def test_finite_numbers():
    values = {"int": 1, "float": 0.5, "numpy": np.float32(0.25), "nan": math.nan, "inf": -math.inf, "text": "1"}
    assert finite({**values, "none": None, "list": [1], "tensor": tf.constant(1.0)}) == {
        "int": 1.0,
        "float": 0.5,
        "numpy": 0.25,
    }


def test_numbers_beyond_floats_and_names_that_are_no_texts():
    assert finite({"huge": 10**400, "share": Fraction(10**400, 3), 7: 1, ("a", 1): 2}) == {"7": 1.0, "('a', 1)": 2.0}


@pytest.mark.parametrize("scaled", [False, True])
def test_steps_trained(scaled):
    model = net()
    adam = keras.optimizers.Adam(gradient_accumulation_steps=2)
    model.compile(
        keras.optimizers.LossScaleOptimizer(adam, initial_scale=1.0) if scaled else adam, "mse", jit_compile=False
    )
    assert steps_trained(model) == 0
    fit(model=model)
    assert steps_trained(model) == 4


def test_steps_of_a_model_that_is_not_compiled():
    assert steps_trained(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])) == 0
