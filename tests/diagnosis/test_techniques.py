"""Each technique does what its line of code does, and is undone."""

import gc
import subprocess
import sys

import keras
import pytest
import tensorflow as tf

import tfopt
from tfopt import kernels
from tfopt.diagnosis import techniques
from tfopt.fit.launching import overlap_of
from tfopt.model.batches import steps_at_once

MODELS = [
    techniques.OVERLAP,
    techniques.LAUNCHES,
    techniques.XLA,
    techniques.NO_XLA,
    techniques.FLASH_ATTENTION,
    techniques.FUSED_BATCH_NORM,
    *map(techniques.policy, ("mixed_bfloat16", "mixed_float16", "float32")),
]


def made(technique):
    """A model that does not have it yet."""
    inputs = keras.Input((64, 8))
    x = keras.layers.BatchNormalization()(keras.layers.MultiHeadAttention(2, 64)(inputs, inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
    model.compile("sgd", "mse", jit_compile=technique is techniques.NO_XLA)
    if technique.name == "float32":
        tfopt.precision.apply(model, "mixed_bfloat16")
    return model


def state(model):
    return (
        model.jit_compile,
        [layer.dtype_policy.name for layer in model.layers],
        [(path.kernel, path.training, path.inference) for path in kernels.explain(model).layers],
        type(model.optimizer),
        overlap_of(model) is not None,
        steps_at_once(model),
    )


@pytest.mark.parametrize("technique", MODELS, ids=lambda one: one.name)
def test_it_does_what_its_line_does_and_is_undone(technique):
    model, by_hand = made(technique), made(technique)
    before = state(model)
    undo = technique.apply(model)
    exec(technique.lines, {"model": by_hand})
    assert state(model) == state(by_hand) != before
    undo()
    assert state(model) == before


@pytest.mark.parametrize("technique", MODELS, ids=lambda one: one.name)
def test_it_stays_if_nobody_holds_what_undoes_it(technique):
    model = made(technique)
    before = state(model)
    technique.apply(model)
    gc.collect()
    assert state(model) != before


@pytest.mark.parametrize("technique", MODELS, ids=lambda one: one.name)
def test_in_a_block_the_model_has_it(technique):
    model = made(technique)
    before = state(model)
    with technique.during(model):
        assert state(model) != before
    assert state(model) == before


def test_a_graph_in_place_of_eager_execution():
    model = made(techniques.GRAPH)
    model.run_eagerly = True
    tf.config.run_functions_eagerly(True)
    try:
        with techniques.GRAPH.during(model):
            assert (model.run_eagerly, tf.config.functions_run_eagerly()) == (False, False)
        assert (model.run_eagerly, tf.config.functions_run_eagerly()) == (True, True)
    finally:
        tf.config.run_functions_eagerly(False)


@pytest.mark.parametrize("technique", [*MODELS[:5], techniques.PREFETCH, techniques.GRAPH], ids=lambda one: one.name)
def test_a_cause_leads_to_its_technique(technique):
    assert techniques.against(technique.cause.name) is technique


def test_float32_leads_to_the_recommended_policy():
    assert techniques.against("float32").name == tfopt.precision.recommend().policy


def test_a_report_can_name_them_without_tensorflow():
    code = "import sys, tfopt.diagnosis.techniques; print({'tensorflow', 'keras'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
