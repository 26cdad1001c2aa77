"""D21: ids are rounded to 16 bits before an Embedding looks them up; counted on the table, row by row."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt import precision, repairs
from tfopt.precision import apply, check

layers = keras.layers
HALVES = ("mixed_bfloat16", "mixed_float16")
IDS = np.arange(5000, dtype="int32").reshape(500, 10)
BATCH = (IDS[-64:], np.arange(64) % 3)


def new(policy, nested=False):
    """A Sequential without Input, or with one as its first layer."""
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(1)
    first = layers.Embedding(5200, 4, name="ids")  # more rows than ids, since float16 rounds 4999 to 5000
    first = keras.Sequential([first], name="inner") if nested else first
    model = keras.Sequential([first, layers.Flatten(), layers.Dense(3, dtype="float32")], name="net")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    keras.config.set_dtype_policy("float32")
    return model


def built(policy, nested=False):
    model = new(policy, nested)
    model.build((None, 10))
    return model


def wrong_rows(model):
    """Share of ids for which the model does not look up their row of the table."""
    model(tf.constant(IDS[:2]))
    embedding = next(x for x in model._flatten_layers() if isinstance(x, layers.Embedding))
    table = np.arange(4 * 5200, dtype="float32").reshape(5200, 4) % 251  # whole numbers that bfloat16 holds
    embedding.embeddings.assign(table)
    rows = keras.Model(model.inputs, model.layers[-1].input)(tf.constant(IDS)).numpy().astype("float32")
    return np.mean(np.any(rows.reshape(500, 10, 4) != table[IDS], axis=-1))


def input_dtypes(model):
    return {x.dtype for x in model._flatten_layers() if isinstance(x, layers.InputLayer)}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", HALVES)
def test_every_id_finds_its_row(policy, nested):
    stock = 0.8 if policy == "mixed_bfloat16" else 0.3
    assert wrong_rows(built(policy, nested)) > stock
    before = new(policy, nested)
    repairs.install("rounded_ids")
    assert wrong_rows(built(policy, nested)) == 0
    assert wrong_rows(before) == 0
    repairs.remove("rounded_ids")
    assert wrong_rows(built(policy, nested)) > stock


def test_a_policy_brings_the_repair():
    with precision.policy("float32"):
        assert not repairs.ROUNDED_IDS.installed
    with precision.policy("mixed_bfloat16"):
        assert wrong_rows(built("mixed_bfloat16")) == 0


def test_an_input_of_the_users_own_stays():
    repairs.install("rounded_ids")
    model = keras.Sequential([keras.Input((10,), dtype="bfloat16"), layers.Dense(3)])
    assert input_dtypes(model) == {"bfloat16"}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_apply_mends_a_model_of_stock_keras(policy, nested):
    model = built("mixed_bfloat16", nested)
    apply(model, policy)
    assert input_dtypes(model) == {"float32"}
    assert wrong_rows(model) == 0


def test_apply_mends_a_model_that_is_built_later():
    model = new("float32")
    apply(model, {"ids": "mixed_bfloat16"})
    assert wrong_rows(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "nested"),
    first_quick([({}, False), ("mixed_bfloat16", True), ({".*": "mixed_bfloat16"}, False), ({}, True)]),
)
def test_check_names_the_cause_until_it_is_mended(policy, nested):
    model = built("mixed_bfloat16", nested)
    report = check(model, BATCH, policy)
    assert not report.passed
    assert "ids" in report.problems[0]
    assert input_dtypes(model) == {"bfloat16"}
    assert check(model, BATCH, report.fallback).passed
    apply(model, report.fallback)
    assert wrong_rows(model) == 0
    assert check(model, BATCH, policy).passed


def test_an_input_of_float32_under_a_policy_of_16_bits_rounds_nothing():
    keras.config.set_dtype_policy("mixed_bfloat16")
    head = layers.Dense(3, dtype="float32")
    model = keras.Sequential([keras.Input((10,)), layers.Embedding(5200, 4), layers.Flatten(), head])
    keras.config.set_dtype_policy("float32")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert wrong_rows(model) == 0
    assert check(model, BATCH, {}).passed


@pytest.mark.slow
def test_check_passes_whole_numbers():
    for model in (built("float32"), keras.Sequential([keras.Input((10,), dtype="int32"), *new("float32").layers])):
        model.compile("sgd", "sparse_categorical_crossentropy")
        assert check(model, BATCH, "mixed_bfloat16").passed
