import keras
import numpy as np
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import Source, build_pipeline, plan_pipeline
from tfopt.pipelines.as_source import dataset


def test_the_count_is_the_cardinality():
    assert dataset(tf.data.Dataset.range(10)).count == 10
    assert dataset(tf.data.Dataset.range(10).repeat()).count is None
    assert dataset(tf.data.Dataset.range(10).filter(lambda number: number > 3)).count is None


def test_endless_data_stays_endless():
    plan = plan_pipeline(tf.data.Dataset.range(10).repeat(), batch_size=4)
    assert int(plan.build().cardinality()) == tf.data.INFINITE_CARDINALITY
    assert "steps_per_epoch" in unwrapped(plan)
    assert plan.to_dict()["cache"] is None


def test_the_plan_says_what_follows_from_an_unknown_count():
    source = tf.data.Dataset.range(10).filter(lambda number: number > 3)
    assert "one optimizer iteration too many" in unwrapped(plan_pipeline(source, batch_size=4))
    assert "optimizer" not in unwrapped(plan_pipeline(source, batch_size=4, training=False))


def test_an_empty_dataset_is_refused():
    with pytest.raises(PipelineError, match="at least one example in dataset"):
        build_pipeline(tf.data.Dataset.range(10).filter(lambda number: number < 0))


def test_failures_of_the_given_dataset_name_the_element():
    failing = tf.data.Dataset.range(5).map(lambda number: 6 // (number - 2))
    with pytest.raises(PipelineError, match="Reading element 2 of dataset failed"):
        build_pipeline(failing, batch_size=2)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: {"x": x}])
def test_shapes_that_agree_become_static_and_the_structure_stays(wrap):
    def generate():
        return (wrap([number] * 3) for number in range(6))

    spec = wrap(tf.TensorSpec([None], tf.int32))
    given = tf.data.Dataset.from_generator(generate, output_signature=spec)
    built = build_pipeline(given, batch_size=2, remainder="drop")
    tf.nest.assert_same_structure(built.element_spec, spec)
    assert tf.nest.flatten(built.element_spec)[0].shape.as_list() == [2, 3]
    assert sum(1 for _ in built) == 3


def add(rows):
    return rows + 1


NUMBERS = tf.data.Dataset.range(12)
SENTENCES = NUMBERS.map(lambda number: tf.fill([number + 1], number))


@pytest.mark.parametrize(
    "batched",
    [
        NUMBERS.batch(4),
        NUMBERS.batch(4, num_parallel_calls=2).prefetch(1),
        NUMBERS.padded_batch(4).cache().with_options(tf.data.Options()),
        NUMBERS.batch(4).shuffle(2).repeat(2).take(5),
        NUMBERS.batch(4).map(add),
        NUMBERS.batch(4, drop_remainder=True).map(add, num_parallel_calls=2).prefetch(1).map(add).skip(1),
        NUMBERS.batch(4).filter(lambda rows: rows[0] > 3).map(lambda rows: {"x": (rows, add(rows))}).cache().take(2),
        NUMBERS.batch(4).map(lambda rows: tf.py_function(add, [rows], tf.int64)),
        NUMBERS.padded_batch(4).map(add).with_options(tf.data.Options()).shuffle(2),
        NUMBERS.batch(2).rebatch(3).map(add),
        SENTENCES.bucket_by_sequence_length(tf.size, [3, 6], [2, 2, 2]).map(add),
        SENTENCES.ragged_batch(4).map(add),
        SENTENCES.ragged_batch(4).map(lambda rows: rows.to_tensor()),
        NUMBERS.group_by_window(lambda number: number % 2, lambda _, window: window.batch(3), window_size=3).map(add),
        tf.data.Dataset.zip(NUMBERS.batch(4).map(add), NUMBERS.batch(4)).map(lambda x, y: (add(x), y)),
        NUMBERS.batch(4).enumerate().map(lambda _, rows: rows),
        NUMBERS.batch(4).concatenate(NUMBERS.batch(4)),
    ],
)
def test_batches_are_refused(batched):
    text = (
        r"Expected a dataset of single examples\. Found a dataset of batches.*dataset\.unbatch\(\), or the dataset "
        r"before \.batch.*Source\(name="
    )
    with pytest.raises(ValueError, match=text):
        build_pipeline(batched)


def test_batches_of_keras_are_refused(photos):
    def read(size):
        return keras.utils.image_dataset_from_directory(photos, batch_size=size, image_size=(4, 4), verbose=False)

    with pytest.raises(ValueError, match="batch_size=None"):
        plan_pipeline(read(2))
    assert len(build_pipeline(read(None), batch_size=4)) == 3


def test_what_was_batched_once_is_not_refused():
    assert [len(batch) for batch in build_pipeline(NUMBERS.batch(4).unbatch(), batch_size=6)] == [6, 6]
    again = NUMBERS.batch(4).map(add).flat_map(tf.data.Dataset.from_tensor_slices).map(add)
    assert sorted(row for batch in build_pipeline(again, batch_size=6) for row in batch.numpy()) == [*range(2, 14)]
    apart = NUMBERS.batch(4).interleave(tf.data.Dataset.from_tensor_slices, num_parallel_calls=2)
    assert sorted(row for batch in build_pipeline(apart, batch_size=6) for row in batch.numpy()) == [*range(12)]
    grouped = NUMBERS.group_by_window(lambda number: number % 2, lambda _, window: window, window_size=3)
    assert build_pipeline(grouped, batch_size=6, remainder="drop").element_spec.shape.as_list() == [6]
    windows = NUMBERS.batch(4, drop_remainder=True)
    pairs = build_pipeline(windows.map(lambda window: (window[:-1], window[-1])), batch_size=3)
    assert [leaf.shape.as_list() for leaf in pairs.element_spec] == [[3, 3], [3]]
    assert build_pipeline(windows.map(lambda window: window[:3]), batch_size=3).element_spec.shape.as_list() == [3, 3]
    assert len(build_pipeline(windows.map(tf.reduce_sum), batch_size=3)) == 1
    wrapped = Source(name="windows", dataset=lambda: windows)
    assert build_pipeline(wrapped, batch_size=3).element_spec.shape.as_list() == [3, 4]


def test_what_lies_in_memory_is_not_cached_again():
    rows = tf.data.Dataset.from_tensor_slices(np.zeros(12))
    assert "save nothing" in plan_pipeline(rows, batch_size=4).stage("cache").reason
    assert plan_pipeline(rows, batch_size=4).to_dict()["cache"] is None
    assert plan_pipeline(rows.map(lambda row: row + 1), batch_size=4).to_dict()["cache"] == "memory"


@pytest.mark.slow
def test_a_service_that_gives_every_element_twice_is_refused():
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    address = dispatcher.target.split("://")[1]
    config = {"dispatcher_address": address, "heartbeat_interval_ms": 100}
    workers = [service.WorkerServer(service.WorkerConfig(**config)) for _ in range(2)]

    def served(mode):
        return tf.data.Dataset.range(20).apply(service.distribute(mode, dispatcher.target))

    assert sorted(served("parallel_epochs").as_numpy_iterator()) == sorted([*range(20)] * 2)
    with pytest.raises(ValueError, match=r"each element once.*every worker.*distributed_epoch"):
        dataset(served("parallel_epochs").map(lambda number: number + 1))
    found = build_pipeline(served("distributed_epoch"), batch_size=4, remainder="keep", cache=None)
    assert sorted(number for batch in found for number in batch.numpy()) == [*range(20)]
    del workers
