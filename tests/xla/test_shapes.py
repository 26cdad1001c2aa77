import json

import numpy as np
import pytest
import tensorflow as tf
from models import batch

from tfopt.errors import PipelineError
from tfopt.xla.shapes import BatchShapes, batch_shapes, elements, format_shape, shape_of


def of_lengths(lengths):
    """Batches of four sequences, each batch of one length; the dataset does not know them."""

    def batches():
        for length in lengths:
            yield np.zeros((4, length), "float32"), np.zeros(4, "int32")

    signature = tf.TensorSpec((None, None)), tf.TensorSpec((None,), tf.int32)
    return tf.data.Dataset.from_generator(batches, output_signature=signature)


def refuses_to_be_read(*parts):
    raise AssertionError("read")


@pytest.mark.parametrize("data", [batch(16), tf.data.Dataset.from_tensor_slices(batch(40)).batch(16, True).repeat(3)])
def test_a_static_shape_is_known_without_reading(data):
    if isinstance(data, tf.data.Dataset):
        data = data.map(lambda *parts: tf.nest.map_structure(_unreadable, parts))
    found = batch_shapes(data, seconds=1.0)
    assert (found.seen, found.complete, found.batches_read) == ((((16, 8, 8, 1), (16,)),), True, 0)
    assert found.steps_per_epoch == (6 if isinstance(data, tf.data.Dataset) else 1)
    assert str(found) == "1 batch shape"


def _unreadable(part):
    with tf.control_dependencies([tf.py_function(refuses_to_be_read, [], [])]):
        return tf.identity(part)


def test_a_last_smaller_batch_is_a_second_shape():
    found = batch_shapes(tf.data.Dataset.from_tensor_slices(batch(40)).batch(16), seconds=60.0)
    assert found.seen == (((16, 8, 8, 1), (16,)), ((8, 8, 8, 1), (8,)))
    assert (found.batches, found.complete, found.steps_per_epoch) == ((2, 1), True, 3)
    assert found.new_per_batch == 0.0
    assert str(found) == "2 batch shapes in the 3 batches read (all of the dataset)"


def test_two_batches_of_two_shapes_foretell_none():
    found = batch_shapes(tf.data.Dataset.from_tensor_slices(batch(24)).batch(16), seconds=60.0)
    assert (found.batches, found.new_per_batch) == ((1, 1), 0.0)


def test_shapes_seen_once_foretell_more():
    found = batch_shapes(of_lengths([5, 6, 7, 8]), seconds=60.0)
    assert (found.count, found.complete, found.steps_per_epoch) == (4, True, None)
    assert found.new_per_batch == 3 / 4  # one of them may be the last, smaller batch


def test_buckets_seen_again_and_again_foretell_none():
    found = batch_shapes(of_lengths([8, 16, 24] * 5 + [7]), seconds=60.0)
    assert (found.count, found.batches, found.new_per_batch) == (4, (5, 5, 5, 1), 0.0)


def test_reading_ends_when_the_time_is_over():
    now = iter(range(1000))
    found = batch_shapes(of_lengths(range(1, 100)), seconds=9.5, clock=lambda: float(next(now)))
    assert (found.batches_read, found.complete) == (10, False)
    assert str(found) == "10 batch shapes in the 10 batches read (not all of the dataset)"


@pytest.mark.slow
def test_reading_ends_after_a_thousand_batches():
    endless = of_lengths([3, 4]).repeat()
    found = batch_shapes(endless, seconds=600.0)
    assert (found.batches_read, found.count, found.complete, found.steps_per_epoch) == (1000, 2, False, None)


def test_one_slow_batch_is_no_sign_of_others():
    found = batch_shapes(of_lengths([5, 6]), seconds=-1.0)
    assert (found.batches_read, found.new_per_batch) == (1, 0.0)


def test_the_tensors_of_a_ragged_batch_count():
    rows = tf.ragged.constant([[1.0], [2.0, 3.0], [4.0, 5.0, 6.0]])
    assert shape_of(rows) == ((6,), (4,))
    found = batch_shapes(tf.data.Dataset.from_tensor_slices(rows).batch(1).map(lambda part: (part,)), seconds=60.0)
    assert {shape[0] for shape in found.seen} == {(1,), (2,), (3,)}


def test_an_empty_dataset_is_refused():
    empty = tf.data.Dataset.from_tensor_slices(batch(8)).batch(16).take(0)
    with pytest.raises(PipelineError, match="Expected a dataset of at least one batch"):
        batch_shapes(empty, seconds=1.0)


def test_json_and_words():
    found = BatchShapes(seen=(((2, 3), (2,)),), batches=(7,), complete=False)
    assert json.loads(json.dumps(found.to_dict()))["seen"] == [[[2, 3], [2]]]
    assert found.to_dict()["batches_read"] == 7
    assert format_shape(found.seen[0]) == "(2, 3), (2,)"
    assert elements(found.seen[0]) == 8


@pytest.mark.parametrize("data", [(np.ones(4), None, np.ones(4)), (None, np.ones(4)), (None,)])
def test_a_batch_with_none_before_the_rest_is_refused(data):
    with pytest.raises(ValueError, match=r"Expected None in a batch only after .* Received: \(.*None.*\)\. Give"):
        batch_shapes(data, seconds=1.0)
    assert batch_shapes((np.ones(4), np.ones(4), None), seconds=1.0).seen == (((4,), (4,)),)
