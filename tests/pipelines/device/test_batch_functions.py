"""The functions that make a batch of rows on the device."""

import keras
import pytest
import tensorflow as tf

from tfopt.pipelines import per_batch
from tfopt.pipelines.device.device_stage import batch_functions
from tfopt.pipelines.shared.options import PipelineOptions

SPEC = (tf.TensorSpec((2,), tf.uint8), tf.TensorSpec((), tf.int32))
ROWS = [tf.constant([[0, 1], [2, 3], [4, 5]], tf.uint8), tf.constant([7, 8, 9], tf.uint32)]
NUMBERS = tf.constant([2, 0], tf.int64)


def one_more(x, y):
    return x + 1, y


def functions(obstacles, **options):
    chosen = PipelineOptions(augment=[per_batch(one_more)] * len(obstacles), cache="device", batch_size=2, **options)
    return batch_functions(chosen, obstacles, SPEC)


def is_compiled(function, *arguments):
    return function.get_concrete_function(*arguments).function_def.attr["_XlaMustCompile"].b


@pytest.mark.parametrize(
    ("obstacles", "jits"),
    [
        ((), [True]),
        ((None, None), [True]),
        (("no", None), [True, False, True]),
        ((None, "no"), [True, False]),
        (("no", "no"), [True, False]),
    ],
)
def test_neighbours_that_xla_compiles_are_one_function(obstacles, jits):
    first, *later = functions(obstacles)
    batch = first(ROWS, NUMBERS, None)
    found = [is_compiled(first, ROWS, NUMBERS, None)]
    for function in later:
        found.append(is_compiled(function, batch, None))
        batch = function(batch, None)
    assert found == jits
    assert batch[0].numpy().tolist() == [[4 + len(obstacles), 5 + len(obstacles)], [len(obstacles), 1 + len(obstacles)]]
    assert batch[1].numpy().tolist() == [9, 7]
    assert batch[1].dtype == tf.int32


def test_the_filling_comes_last_and_is_compiled():
    first, without, last = functions(("no",), remainder="pad")
    batch = first(ROWS, NUMBERS[:1], None)
    x, y, weights = last(without(batch, None), None)
    assert (x.numpy().tolist(), y.numpy().tolist(), weights.numpy().tolist()) == ([[5, 6]] * 2, [9, 9], [2.0, 0.0])
    assert is_compiled(last, batch, None)


def test_a_layer_is_compiled_with_the_gather():
    options = PipelineOptions(augment=keras.layers.Rescaling(2.0), cache="device", batch_size=2)
    (only,) = batch_functions(options, (None,), SPEC)
    assert only(ROWS, NUMBERS, tf.constant(5, tf.int64))[0].numpy().tolist() == [[8.0, 10.0], [0.0, 2.0]]
