"""Examples to train on and to validate on: apart, complete, and the same ones whatever else is chosen."""

import keras
import numpy as np
import part_sources
import pytest
import tensorflow as tf
from unwrapped import unwrapped

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import arrays, build_pipeline, images, loader, plan_pipeline, tokens, write_records
from tfopt.pipelines.shared.nondeterminism import lineage
from tfopt.pipelines.shared.seeding import in_batches, sequence
from tfopt.pipelines.sources.split import take_split


def numbers(dataset):
    return [int(number) for batch in dataset for number in np.ravel(batch)]


def both(source, transform, **options):
    """The numbers in one epoch of training and of validation."""
    options = {"batch_size": 8, "transform": transform, "split": 0.2, "remainder": "keep"} | options
    return [numbers(build_pipeline(source, training=training, **options)) for training in (True, False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", part_sources.NAMES)
def test_each_example_is_in_one_part(tmp_path, name):
    source, transform = part_sources.source(tmp_path, name)
    train, validate = both(source, transform, cache=None)
    assert sorted(train + validate) == part_sources.ALL
    assert len(validate) == round(0.2 * part_sources.COUNT)
    order = numbers(build_pipeline(source, batch_size=8, transform=transform, training=False))
    assert validate == [number for number in order if number in validate]
    assert train != [number for number in order if number in train]
    assert max(np.diff(sorted(validate))) < 40  # from all over the data
    again, same = both(source, transform, cache="memory", seed=7, batch_size=5)
    assert (sorted(again), same) == (sorted(train), validate)


def test_each_epoch_is_another_permutation_of_the_same_examples():
    dataset = build_pipeline(np.arange(50), batch_size=10, split=0.2, cache=None)
    epochs = [numbers(dataset) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_positions_are_still_read_many_at_once():
    part = take_split(arrays(np.arange(100)), 0.1, training=True)
    positions = part.at(sequence(90))
    each = [int(number) for number in positions]
    batches = in_batches(positions, 40, full=False)
    assert [len(batch) for batch in batches] == [40, 40, 10]
    assert [int(number) for batch in batches for number in batch] == each
    stages = [type(stage).__name__ for stage in lineage(batches)]
    assert not [name for name in stages if "Batch" in name]  # none collects single numbers


def test_the_plan_says_so(photos):
    train = plan_pipeline(str(photos), batch_size=4, split=0.25, transform=lambda image, label: label)
    assert "split=0.25: 9 of 12 to train on; training=False has those to validate on" in unwrapped(train)
    assert len(train.source.files) == 9
    assert train.source.class_names == images(photos).class_names


@pytest.mark.slow
def test_a_cache_on_disk_holds_one_part_only(tmp_path):
    source = np.arange(100)
    kept = {"cache": tmp_path / "cache", "cache_after": "decode"}
    first = both(source, None, **kept)
    assert both(source, None, **kept) != [[], []]
    assert [sorted(part) for part in both(source, None, **kept)] == [sorted(part) for part in first]


@pytest.mark.parametrize(
    ("source", "split", "error", "found"),
    [
        (np.arange(10), 1.0, ValueError, "below 1"),
        (np.arange(10), 20, ValueError, r"Received: 20\. "),
        (np.arange(10), 0, ValueError, "above 0"),
        (np.arange(10), "0.1", TypeError, "number"),
        (np.arange(10), 0.01, PipelineError, "of the 10 in arrays, which is 0"),
        (tf.data.Dataset.range(9).filter(lambda number: True), 0.5, PipelineError, "assert_cardinality"),
        (tf.data.Dataset.range(9).repeat(), 0.5, PipelineError, "unknown or endless"),
        (tf.data.Dataset.range(9).shuffle(9), 0.5, UnsupportedError, "the same order each time, for `split`"),
        (tf.data.Dataset.range(9).repeat(2).map(tf.abs), 0.5, UnsupportedError, "each example once for `split`"),
    ],
)
def test_what_cannot_be_split(source, split, error, found):
    with pytest.raises(error, match=found):
        plan_pipeline(source, batch_size=2, split=split)


def test_what_is_repeated_once_can_be_split():
    plan = plan_pipeline(tf.data.Dataset.range(10).repeat(1), batch_size=2, split=0.2, shuffle=False)
    assert sum(len(batch) for batch in plan.build().as_numpy_iterator()) == 8


def test_examples_that_are_sampled_alike_each_time_can_be_split():
    def numbers(training):
        parts = [tf.data.Dataset.range(20), tf.data.Dataset.range(20, 40)]
        dataset = tf.data.Dataset.sample_from_datasets(parts, seed=1)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(40))
        plan = plan_pipeline(dataset, batch_size=4, split=0.2, shuffle=False, cache=None, training=training)
        return {int(number) for batch in plan.build() for number in batch}

    assert numbers(True) | numbers(False) == set(range(40))
    assert not numbers(True) & numbers(False)


def in_each(read):
    """Numbers that each of two files is read for."""
    numbers = tf.data.Dataset.range(2).interleave(lambda file: read(tf.data.Dataset.range(20 * file, 20 * file + 20)))
    return numbers.apply(tf.data.experimental.assert_cardinality(40))


def sampled():
    numbers = tf.data.Dataset.sample_from_datasets([tf.data.Dataset.range(20), tf.data.Dataset.range(20, 40)])
    return numbers.apply(tf.data.experimental.assert_cardinality(40))


class Shuffled:
    """A loader of examples in another order each time."""

    def __len__(self):
        return 40

    def __iter__(self):
        return iter(np.random.permutation(40).tolist())


def generated():
    numbers = tf.data.Dataset.from_generator(lambda: iter(Shuffled()), output_signature=tf.TensorSpec((), tf.int64))
    return numbers.apply(tf.data.experimental.assert_cardinality(40))


def documents():
    return tokens(tf.data.Dataset.range(40).shuffle(40).map(lambda number: tf.repeat(number, 2)))


@pytest.mark.parametrize(
    ("source", "options", "found"),
    [
        (lambda: in_each(lambda file: file.shuffle(20)), {}, "ShuffleDatasetV3"),
        (
            lambda: in_each(lambda file: file.map(lambda n: n, num_parallel_calls=2, deterministic=False)),
            {},
            "ParallelMapDatasetV2",
        ),
        (sampled, {}, r"Dataset\.random"),
        (generated, {}, "that the first 20 elements of dataset differ when read again"),
        (lambda: loader(Shuffled(), batched=False), {}, "Shuffled, which decides what it yields"),
        (documents, {"pad": "batch"}, r"Dataset\.shuffle in the documents"),
        (documents, {"pack": 8}, r"Dataset\.shuffle in the documents"),
        (
            lambda: tokens(loader(Shuffled(), batched=False), tokenize=lambda texts: [[1] for _ in texts]),
            {},
            "Shuffled",
        ),
    ],
)
def test_what_has_another_order_each_time_is_not_split(source, options, found):
    """Else examples to train on are among those to validate on."""
    with pytest.raises(UnsupportedError, match=f"same.*each time, for `split`. Found {found}"):
        plan_pipeline(source(), batch_size=4, split=0.5, cache=None, **options)


def test_random_numbers_in_examples_do_not_hinder():
    noisy = tf.data.Dataset.range(40).map(lambda number: number + tf.random.uniform((), 0, 1, tf.int64))
    assert len(build_pipeline(noisy, batch_size=4, split=0.5, cache=None, training=False)) == 5


def test_the_source_of_a_plan_stays_divided(photos, tmp_path):
    plan = plan_pipeline(photos, batch_size=4, split=0.25, training=False, transform=lambda image, label: label)
    for again in ("raise", "skip"):
        assert plan_pipeline(plan.source, batch_size=3, training=False, on_bad_file=again).source.count == 3
    assert write_records(plan.source, tmp_path / "written").count == 3


def test_validation_split_names_it():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    data = np.ones((20, 1), "float32"), np.ones((20, 1), "float32")
    dataset = build_pipeline(data, batch_size=4)
    with pytest.raises(ValueError, match=r"build_pipeline\(source, split=0.2, training=False\) for validation_data"):
        model.fit(dataset, validation_split=0.2, verbose=0)
    model.fit(*data, validation_split=0.2, verbose=0)  # arrays are divided by Keras
    with pytest.raises(ValueError, match="only supported for tensors or NumPy arrays"):
        model.fit(tf.data.Dataset.from_tensor_slices(data).batch(4), validation_split=0.2, verbose=0)
