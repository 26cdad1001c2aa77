"""Copies ahead, on CPU devices: where the batches lie, in which order, and that nothing is kept that was never read."""

import gc

import pytest
import tensorflow as tf
from python_child import run_python

from tfopt.pipelines.device.copying import copy_ahead


@pytest.mark.parametrize("reads", [0, 1, 5])
def test_the_hosts_iterator_goes_with_the_devices(reads):
    iterator = iter(copy_ahead(tf.data.Dataset.range(5), "/cpu:0", None))
    opened = iterator._dataset._input_dataset
    handle = opened._deleter._handle
    assert [int(next(iterator)) for _ in range(reads)] == list(range(reads))
    del iterator, opened
    gc.collect()
    with pytest.raises(tf.errors.NotFoundError):
        tf.raw_ops.DestroyResourceOp(resource=handle, ignore_lookup_error=False)


def test_the_options_are_those_of_the_host():
    options = tf.data.Options()
    options.threading.private_threadpool_size = 3
    copied = copy_ahead(tf.data.Dataset.range(4).with_options(options), "/cpu:0", 4)
    assert copied.options().threading.private_threadpool_size == 3


def test_in_a_graph_and_behind_further_stages_the_batches_are_the_same():
    copied = copy_ahead(tf.data.Dataset.range(5), "/cpu:0", None)

    @tf.function
    def total():
        found = tf.constant(0, tf.int64)
        for number in copied:
            found += number
        return found + next(iter(copied))

    assert int(total()) == 10
    assert list(copied.map(lambda number: 2 * number).as_numpy_iterator()) == [0, 2, 4, 6, 8]
    assert list(copied.as_numpy_iterator()) == [0, 1, 2, 3, 4]


def test_an_error_of_the_host_is_raised_where_the_batch_is_asked_for():
    iterator = iter(copy_ahead(tf.data.Dataset.range(3).map(lambda n: 6 // (1 - n)), "/cpu:0", None))
    assert int(next(iterator)) == 6
    with pytest.raises(tf.errors.InvalidArgumentError, match="division by zero"):
        next(iterator)


ON_ANOTHER_DEVICE = """
import tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tfopt.pipelines.device.copying import copy_ahead

def make():
    return tf.data.Dataset.range(8).shuffle(8, seed=1).batch(4)

host, copied = make(), copy_ahead(make(), "CPU:1", None)
for epoch in range(4):
    batches, expected = list(copied), list(host)
    assert {batch.device[-5:] for batch in batches} == {"CPU:1"}
    assert [batch.numpy().tolist() for batch in batches] == [batch.numpy().tolist() for batch in expected]
    iter(copied), iter(host)
"""


@pytest.mark.slow
def test_batches_lie_on_the_device_in_the_order_of_the_host():
    run_python(ON_ANOTHER_DEVICE)
