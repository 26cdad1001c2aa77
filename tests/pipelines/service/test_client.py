import h5py
import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, hdf5, plan_pipeline
from tfopt.pipelines.service import client

ROWS = np.arange(100)
NOWHERE = "grpc://127.0.0.1:9"
VARIABLE = tf.Variable(1.0)


def by_python(row):
    return tf.numpy_function(lambda value: value, [row], tf.int64)


def add_variable(row):
    return tf.cast(row, tf.float32) + VARIABLE


RANGE = tf.data.Dataset.range(100)
GENERATED = tf.data.Dataset.from_generator(lambda: iter(range(3)), output_signature=tf.TensorSpec((), tf.int64))


@pytest.mark.parametrize(
    ("data", "options", "found"),
    [
        # What the workers cannot do.
        (ROWS, {"cache": "memory"}, "cache='memory'"),
        (ROWS, {"cache": "device"}, "cache='device'"),
        (ROWS, {"cache": "./folder"}, "cache='/"),
        (ROWS, {"seed": 1}, "seed=1"),
        (ROWS, {"transform": by_python}, "in the transform, which calls Python"),
        (ROWS, {"augment": by_python}, "in the augment, which calls Python"),
        (ROWS, {"transform": add_variable}, "in the transform, which holds a variable"),
        (GENERATED, {}, "Python"),
        # Sources that depend on the places of elements.
        (RANGE.take(50), {}, "take"),
        (RANGE.skip(50), {}, "skip"),
        (RANGE.shard(2, 0), {}, "shard"),
        (tf.data.Dataset.zip(RANGE, RANGE), {}, "zip"),
        (RANGE.enumerate(), {}, "zip or enumerate"),
        (RANGE.repeat(2), {}, "repeat"),
        (RANGE.repeat(), {}, "an endless source"),
        (RANGE.batch(2).unbatch(), {}, "batch"),
        (RANGE.flat_map(tf.data.Dataset.range), {}, "flat_map"),
    ],
)
def test_what_a_service_cannot_run_is_refused(data, options, found):
    with pytest.raises(ValueError, match=rf"tf\.data service expects .*{found}.*What to do"):
        plan_pipeline(data, batch_size=2, service=NOWHERE, **options)


def test_sources_that_python_reads_are_refused(tmp_path):
    """They promise TensorFlow that they keep no state, and so are none of its opaque operations."""
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = ROWS
    with pytest.raises(ValueError, match=r"tf\.data service expects .*rows\.h5, which calls Python"):
        plan_pipeline(hdf5(tmp_path / "rows.h5", "rows"), batch_size=2, service=NOWHERE)


def test_large_arrays_are_refused(monkeypatch):
    monkeypatch.setattr(client, "_GRAPH_BYTES", 799)
    with pytest.raises(ValueError, match="arrays below 2 GiB"):
        plan_pipeline(ROWS, batch_size=2, service=NOWHERE)


@pytest.mark.parametrize("address", ["localhost:5050", "grpc://localhost", "http://a:1", "grpc://:5050", "grpc://a:0"])
def test_an_address_has_a_form(address):
    with pytest.raises(ValueError, match="Expected 'grpc://host:port' for `service`"):
        build_pipeline(ROWS, service=address)
