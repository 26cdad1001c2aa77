import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.service import client

ROWS = np.arange(100)
NOWHERE = "grpc://127.0.0.1:9"
VARIABLE = tf.Variable(1.0)


def by_python(row):
    return tf.numpy_function(lambda value: value, [row], tf.int64)


def add_variable(row):
    return tf.cast(row, tf.float32) + VARIABLE


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"cache": "memory"}, "cache='memory'"),
        ({"cache": "device"}, "cache='device'"),
        ({"cache": "./folder"}, "cache='/"),
        ({"seed": 1}, "seed=1"),
        ({"transform": by_python}, "in the transform, which calls Python"),
        ({"augment": by_python}, "in the augment, which calls Python"),
        ({"transform": add_variable}, "in the transform, which holds a variable"),
    ],
)
def test_what_the_workers_cannot_do_is_refused(options, found):
    with pytest.raises(ValueError, match=rf"tf\.data service expects .*{found}.*What to do"):
        plan_pipeline(ROWS, batch_size=10, service=NOWHERE, **options)


RANGE = tf.data.Dataset.range(100)


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (RANGE.take(50), "take"),
        (RANGE.skip(50), "skip"),
        (RANGE.shard(2, 0), "shard"),
        (tf.data.Dataset.zip(RANGE, RANGE), "zip"),
        (RANGE.enumerate(), "zip or enumerate"),
        (RANGE.repeat(2), "repeat"),
        (RANGE.repeat(), "an endless source"),
        (RANGE.batch(2).unbatch(), "batch"),
        (RANGE.flat_map(tf.data.Dataset.range), "flat_map"),
        (
            tf.data.Dataset.from_generator(lambda: iter(range(3)), output_signature=tf.TensorSpec((), tf.int64)),
            "Python",
        ),
    ],
)
def test_sources_that_depend_on_places_are_refused(dataset, found):
    with pytest.raises(ValueError, match=rf"tf\.data service expects .*{found}.*What to do"):
        plan_pipeline(dataset, batch_size=2, service=NOWHERE)


def test_large_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(client, "_GRAPH_BYTES", 799)
    with pytest.raises(ValueError, match="arrays below 2 GiB"):
        plan_pipeline(ROWS, batch_size=2, service=NOWHERE)


@pytest.mark.parametrize("address", ["localhost:5050", "grpc://localhost", "http://a:1", "grpc://:5050", "grpc://a:0"])
def test_an_address_has_a_form(address):
    with pytest.raises(ValueError, match="Expected 'grpc://host:port' for `service`"):
        build_pipeline(ROWS, service=address)
