"""Layers that lack a fast kernel: which experiments there are, and that a model's own kernels outlast them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt import kernels
from tfopt.diagnosis.candidates import Candidate, candidates
from tfopt.diagnosis.findings import NotTested
from tfopt.diagnosis.techniques import FLASH_ATTENTION
from tfopt.diagnosis.training import Training

X = np.ones((16, 64, 8), "float32")


def made(jit_compile=False):
    inputs = keras.Input((64, 8))
    x = keras.layers.BatchNormalization()(keras.layers.MultiHeadAttention(2, 64)(inputs, inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    model.compile("sgd", "mse", jit_compile=jit_compile)
    return model


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """A CPU stands in for the GPU."""
    listed = tf.config.list_logical_devices
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind=None: listed("CPU"))
    monkeypatch.setattr("tfopt.diagnosis.candidates.copied_ahead", lambda resident: resident.prefetch(1))


def in_use(model):
    return [path.kernel for path in kernels.explain(model).layers if "not requested" not in str(path)]


@pytest.mark.slow
def test_an_experiment_gives_back_the_kernels_that_were_there():
    model = made()
    kernels.fuse_batch_norm(model)
    function = model.layers[2].call
    with FLASH_ATTENTION.during(model):
        assert in_use(model) == ["flash attention", "fused batch norm"]
    assert in_use(model) == ["fused batch norm"]
    assert model.layers[2].call is function
    model.fit(X, np.ones((16, 1)), verbose=0)
    assert kernels.explain(model).layers[1].training == ()


def test_a_tuned_model_takes_only_its_own_kernel_back():
    model = made()
    kernels.fuse_batch_norm(model)
    undo = FLASH_ATTENTION.apply(model)
    assert in_use(model) == ["flash attention", "fused batch norm"]
    undo()
    assert in_use(model) == ["fused batch norm"]


def named(kind, model):
    training = Training.of(model, {"x": X, "y": np.ones((16, 1), "float32")})
    return {one.name: one for one in candidates(training) if isinstance(one, kind)}


ATTENTION, BATCH_NORM = "attention without a fast kernel", "batch norm without a fast kernel"


@pytest.mark.slow
@pytest.mark.no_gpu
def test_without_a_gpu_it_says_so():
    assert {ATTENTION, BATCH_NORM, "copying to the GPU"} <= named(NotTested, made()).keys()


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_what_is_tested_on_a_gpu():
    found = named(Candidate, made())
    assert BATCH_NORM in found
    assert found["copying to the GPU"].against == "input"
    assert "tfopt.fit.overlap(model)" in found["copying to the GPU"].lines
    assert "XLA fuses it" in named(NotTested, made(jit_compile=True))[BATCH_NORM].reason


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_kernel_that_no_layer_can_take_is_not_timed():
    assert ATTENTION not in named(Candidate, made())
    assert "XLA" in named(NotTested, made())[ATTENTION].reason  # and 16 bits


@pytest.mark.gpu
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_diagnosis_on_a_gpu_times_the_copy_and_the_kernels(jit_compile):
    keras.config.set_dtype_policy("mixed_bfloat16")
    diagnosis = tfopt.diagnose(made(jit_compile), (np.concatenate([X] * 16), np.ones((256, 1), "float32")), steps=5)
    names = {cause.name for cause in diagnosis.causes}
    assert {"copying to the GPU", ATTENTION if jit_compile else BATCH_NORM} <= names
