"""What a remedy saves, and which data lack a prefetch. test_remedies_applied.py carries remedies out."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfopt.diagnosis import remedies
from tfopt.diagnosis.candidates import prefetched
from tfopt.pipelines.profiling.written_stages import cached_where


@pytest.fixture(autouse=True)
def _no_global_seed():
    """Another test may have set one, and a shuffle then has a seed of its own."""
    tf.random.set_seed(None)


X, Y = np.zeros((32, 4), "float32"), np.zeros((32, 1), "float32")


def training(**given):
    return SimpleNamespace(callbacks=(), **{"epochs": 1, "epochs_per_validation": 1} | given)


@pytest.mark.parametrize(
    ("given", "line", "saved"),
    [
        ({"epochs": 10}, "validation_freq=5", 0.8),
        ({"epochs": 10, "epochs_per_validation": 2}, "validation_freq=10", 0.8),
        ({"epochs": 1}, "validation_steps=3", 0.75),  # of 12 batches; validation_freq=5 would switch it off
        ({"epochs": 4}, "validation_steps=3", 0.75),
    ],
)
def test_less_validation_is_not_none(given, line, saved):
    found, share = remedies.validation(training(**given), 12)
    assert line in found
    assert share == pytest.approx(saved)


def test_a_prefetch_before_options_counts():
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    assert prefetched(data.with_options(options)) is not None
    assert prefetched(data.prefetch(2).with_options(options)) is None


@pytest.mark.parametrize(
    ("shuffle", "batched", "calls"),
    [
        ({}, False, ".cache().shuffle(36)"),
        ({"seed": 1}, False, ".cache().shuffle(36, seed=1)"),
        ({"reshuffle_each_iteration": False}, False, ".cache()"),
        ({"seed": 1}, True, ".shuffle(32, seed=1).batch(8)"),
        ({"reshuffle_each_iteration": False}, True, ".cache()"),
    ],
)
def test_a_cache_leaves_the_order_as_it_was_asked_for(shuffle, batched, calls):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(36, **shuffle)
    data = (data.batch(8) if batched else data).map(lambda x, y: (x + 1, y))
    assert cached_where(data)[1].endswith(calls)


def test_a_shuffle_whose_order_stays_does_not_stand_for_one_before_the_cache():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(36).map(lambda x, y: (x + 1, y))
    assert cached_where(data.shuffle(8, reshuffle_each_iteration=False))[1] == ".cache().shuffle(36)"
