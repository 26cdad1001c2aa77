"""`transform=per_batch(...)`: the same examples in the same order as one by one, wherever it stands."""

import dataclasses
import itertools

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.pipelines import (
    CentralCrop,
    Source,
    build_pipeline,
    per_batch,
    plan_pipeline,
    records,
    tokens,
    write_records,
)
from tfopt.pipelines.as_source import as_source

COUNT = 50
X, Y = np.random.default_rng(0).random((COUNT, 3)).astype("float32"), np.arange(COUNT)


def double(x, y):
    return tf.cast(x, tf.float32) * 2 + tf.reduce_sum(tf.cast(x, tf.float32), axis=-1, keepdims=True), y


def from_arrays(tmp_path):
    return X, Y


def from_dataset(tmp_path):
    return tf.data.Dataset.from_tensor_slices((X, Y))


def from_unknown(tmp_path):
    return from_dataset(tmp_path).filter(lambda x, y: y >= 0)


def from_keys(tmp_path):
    return Source(
        name="keys", dataset=lambda: tf.data.Dataset.range(COUNT), decode=lambda key: (tf.gather(X, key), key)
    )


def from_records(tmp_path):
    if not (tmp_path / "records").exists():
        write_records((X, Y), tmp_path / "records", shards=3)
    return records(tmp_path / "records")


SOURCES = [from_arrays, from_dataset, from_unknown, from_keys, from_records]
OPTIONS = [
    {"cache": None},
    {"cache": "memory"},
    {"cache": "memory", "cache_after": "decode"},
    {"cache": "caches"},
    {"cache": None, "shuffle": False},
    {"cache": None, "augment": lambda x, y: (x + 1, y)},
    {"cache": "memory", "augment": per_batch(lambda x, y: (x[::-1], y))},
    {"cache": None, "augment": per_batch(lambda x, y: (x[::-1], y))},
    {"cache": None, "remainder": "pad"},
]


@pytest.mark.slow
@pytest.mark.parametrize(("source", "options"), first_quick(itertools.product(SOURCES, OPTIONS), 4, every=4))
def test_batches_are_those_of_a_transform_of_single_examples(tmp_path, source, options):
    options = {"batch_size": 8, "seed": 3, "remainder": "keep", "cache_key": "1"} | options
    if options["cache"] == "caches":
        options["cache"] = str(tmp_path / "caches")
    single = build_pipeline(source(tmp_path), transform=double, **options)
    many = build_pipeline(source(tmp_path), transform=per_batch(double), **options)
    assert many.element_spec == single.element_spec
    for _ in range(3):
        for ours, theirs in zip(many, single, strict=True):
            assert ours[1].numpy().tolist() == theirs[1].numpy().tolist()
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.slow
def test_decoded_images_are_transformed_many_at_once(photos):
    def lighter(images, labels):
        return images // 2, labels

    options = {"batch_size": 4, "crop": CentralCrop(3), "training": False, "cache": None}
    plan = plan_pipeline(photos, transform=per_batch(lighter), **options)
    assert plan.stage("transform").setting == "whole batches"
    for ours, theirs in zip(plan.build(), build_pipeline(photos, transform=lighter, **options), strict=True):
        np.testing.assert_array_equal(ours[0], theirs[0])
        np.testing.assert_array_equal(ours[1], theirs[1])


def test_unequal_examples_are_named(photos, picture):
    picture(photos / "a" / "other.png", size=(3, 3))
    with pytest.raises(PipelineError, match="failed on a batch of 13"):
        plan_pipeline(photos, transform=per_batch(lambda images, labels: (images, labels)), batch_size=2)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x, y: (x - tf.reduce_mean(x, axis=0), y), "something else of element 0 alone"),
        (lambda x, y: (x[:, :2] + tf.cast(tf.shape(x)[0], tf.float32), y), "something else of element 0 alone"),
        (lambda x, y: (x[:1], y[:1]), "makes 1 examples of 32"),
        (lambda x, y: (x, y[::-1]), "something else of element 0 alone"),
        (
            lambda x, y: (x, y + 2**60 + y % tf.cast(tf.shape(y)[0], tf.int64)),
            "something else of element 1 alone",
        ),
        (lambda x, y: (1e-6 * (x - tf.reduce_mean(x, axis=0)), y), "something else of element 0 alone"),
    ],
)
def test_what_mixes_examples_is_refused(function, found):
    with pytest.raises(PipelineError, match=found):
        plan_pipeline((X, Y), transform=per_batch(function), batch_size=8)


@pytest.mark.parametrize("option", [{"pad": "batch"}, {"bucket": True}])
def test_padding_is_no_part_of_an_example(option):
    """The documents that the planner looks at have one length, and others follow."""
    documents = tokens([[1] * 5] * 1100 + [[1] * 9] * 40)

    def with_length(rows):
        return rows, tf.fill((tf.shape(rows)[0],), tf.shape(rows)[1])

    with pytest.raises(ValueError, match=r"padded after it\. Found TensorSpec.*Pass a function of single"):
        plan_pipeline(documents, transform=per_batch(with_length), batch_size=16, cache=None, **option)


def test_a_transform_takes_no_seed():
    with pytest.raises(ValueError, match="takes a seed"):
        plan_pipeline((X, Y), transform=per_batch(lambda x, y, seed: (x, y)))
    with pytest.raises(ValueError, match="Expected a deterministic `transform`"):
        plan_pipeline((X, Y), transform=per_batch(lambda x, y: (x + tf.random.uniform((3,)), y)))


def test_what_is_cached_under_either_has_a_key_of_its_own(tmp_path):
    options = {"cache": str(tmp_path), "batch_size": 8}
    keys = [plan_pipeline((X, Y), transform=each, **options).stage("cache").key for each in (double, per_batch(double))]
    assert keys[0] != keys[1]


def test_a_source_that_decodes_batches_otherwise_is_refused():
    source = Source(
        name="keys",
        dataset=lambda: tf.data.Dataset.range(COUNT),
        decode=lambda key: 2 * key,
        decode_batch=lambda keys: 3 * keys,
    )
    with pytest.raises(PipelineError, match=r"decode_batch of keys .* something else of element 1 alone"):
        plan_pipeline(source, batch_size=8)


def test_what_decodes_batches_is_in_the_key_and_searched(tmp_path):
    def source(function):
        return Source(
            name="keys",
            dataset=lambda: tf.data.Dataset.range(COUNT),
            decode=lambda key: 2 * key,
            decode_batch=function,
            fingerprint=lambda: 1,
        )

    options = {"batch_size": 8, "cache": str(tmp_path)}
    functions = [lambda keys: 2 * keys, lambda keys: keys + keys]
    keys = [plan_pipeline(source(function), **options).stage("cache").key for function in functions]
    assert keys[0] != keys[1]
    drawn = source(lambda keys: 2 * keys + tf.random.uniform((), 0, 1, tf.int64))
    with pytest.raises(ValueError, match="random"):
        plan_pipeline(drawn, **options)


def test_sources_of_another_order_have_a_cache_of_their_own(tmp_path):
    source = as_source((X, Y))
    keys = [
        plan_pipeline(each, batch_size=8, cache=str(tmp_path), transform=double).stage("cache").key
        for each in (source, dataclasses.replace(source, at=None))
    ]
    assert keys[0] != keys[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "bool", "uint64"])
def test_scalars_of_every_type_are_compared(dtype):
    values = tf.cast(np.arange(COUNT), dtype)
    assert plan_pipeline({"value": values}, batch_size=8).stage("decode").setting == "whole batches"


@pytest.mark.filterwarnings("error")
def test_examples_without_a_finite_number_are_compared():
    rows = np.array([[np.nan], [np.inf], [1.0], [-np.inf]], "float32")
    assert len(list(build_pipeline(rows, batch_size=2, transform=per_batch(lambda row: row * 2)))) == 2
    with pytest.raises(PipelineError, match="something else of element 2 alone"):
        plan_pipeline(rows, batch_size=2, transform=per_batch(lambda row: row + tf.cast(tf.shape(row)[0], row.dtype)))
