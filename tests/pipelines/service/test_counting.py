"""Every element once: what came out is counted."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import build_pipeline, per_batch, plan_pipeline, records

ROWS = np.arange(1000)


def elements(dataset):
    return np.sort(np.concatenate([np.atleast_1d(batch) for batch in dataset])).tolist()


def double(row):
    return row * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"transform": double}, 2),
        ({"transform": double, "training": False}, 2),
        ({"transform": per_batch(double)}, 2),
        ({"transform": per_batch(double), "augment": double}, 4),
    ],
)
def test_each_element_comes_once_an_epoch(service, options, times):
    dataset = build_pipeline(ROWS, batch_size=7, remainder="keep", service=service, **options)
    assert len(dataset) == 143
    for _ in range(2):
        assert elements(dataset) == (times * ROWS).tolist()


@pytest.mark.slow
def test_batches_are_full_whatever_the_workers_end_with(service):
    batches = list(build_pipeline(ROWS, batch_size=64, service=service))
    assert [len(batch) for batch in batches] == [64] * 15
    assert len(set(np.concatenate(batches).tolist())) == 960


@pytest.mark.slow
def test_files_are_shared_out(service, record_files):
    def parse(record):
        return tf.io.parse_single_example(record, {"number": tf.io.FixedLenFeature((), tf.int64)})["number"]

    paths = record_files(files=5)
    options = {"batch_size": 4, "remainder": "keep", "transform": parse, "service": service}
    assert elements(build_pipeline(paths, **options)) == list(range(50))
    dataset = build_pipeline(records(paths, on_bad_record="skip"), training=False, **options)
    assert elements(dataset) == list(range(50))


@pytest.mark.slow
def test_images_are_decoded_there(service, photos):
    dataset = build_pipeline(str(photos), batch_size=5, remainder="keep", service=service)
    assert sorted(int(shade) for images, _ in dataset for shade in images[:, 1, 1, 0]) == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("global_seed", [None, 1])
def test_draws_differ_between_elements_workers_and_epochs(service, global_seed):
    def word(row, seed):
        return tf.stack([tf.cast(row, tf.int32), seed[0]])

    tf.random.set_seed(global_seed)
    dataset = build_pipeline(ROWS, batch_size=100, augment=word, service=service)
    first, second = (np.concatenate(list(dataset)) for _ in range(2))
    assert len({*first[:, 1], *second[:, 1]}) == 2000
    assert first[:, 0].tolist() != second[:, 0].tolist()


@pytest.mark.slow
def test_functions_of_batches_take_the_batches_of_the_training(service):
    def sizes(rows):
        return tf.fill((1,), tf.shape(rows)[0])

    dataset = build_pipeline(ROWS, batch_size=300, remainder="keep", augment=per_batch(sizes), service=service)
    assert [size.numpy().item() for size in dataset] == [300, 300, 300, 100]


@pytest.mark.slow
def test_the_last_batch_is_padded(service):
    pairs = (ROWS.astype("float32"), ROWS)
    *_, (x, _, weight) = build_pipeline(pairs, batch_size=300, remainder="pad", service=service)
    assert x.shape == (300,)
    assert int(tf.math.count_nonzero(weight)) == 100


def test_the_plan_says_what_runs_where(service):
    plan = plan_pipeline(ROWS, batch_size=64, service=service)
    reasons = {stage.name: stage.reason for stage in plan.stages}
    assert service in plan.stage("service").setting
    assert "3 workers there" in reasons["service"]
    assert "on each run" in reasons["order"]
    assert "divide the examples differently" in reasons["cache"]
    names = list(reasons)
    assert names.index("batch") < names.index("service") < names.index("prefetch")
