import gc
import os
import sys

import numpy as np
import pytest
import tensorflow as tf
from python_child import run_python

from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.inspection import facts
from tfopt.pipelines.stages import order_stages

ROWS = np.arange(50, dtype=np.float32)


def double(row):
    return row * 2


def add_noise(row, *, seed):
    return row, tf.random.stateless_uniform((), seed), seed


def epochs(dataset, number=3):
    return [
        [tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), batch) for batch in dataset]
        for _ in range(number)
    ]


@pytest.mark.slow
def test_two_processes_under_a_seed_agree():
    options = "batch_size=8, seed=7, transform=double, augment=add_noise"
    script = f"""
import runpy
import tfopt.pipelines
here = runpy.run_path({__file__!r})
double, add_noise = here["double"], here["add_noise"]
print(here["epochs"](tfopt.pipelines.build_pipeline(here["ROWS"], {options})))
"""
    printed = run_python(script, PYTHONPATH=os.pathsep.join(sys.path))
    here = epochs(build_pipeline(ROWS, batch_size=8, seed=7, transform=double, augment=add_noise))
    assert printed.splitlines()[-1] == str(here)


@pytest.mark.parametrize("shuffle_mib", [1024, 0.0001])
@pytest.mark.parametrize("count_known", [True, False])
def test_the_order_under_a_seed_does_not_follow_the_free_memory(
    record_files, free_memory, monkeypatch, count_known, shuffle_mib
):
    for module in (facts, order_stages):
        monkeypatch.setattr(module, "SHUFFLE_MIB", shuffle_mib)

    def parse(serialized):
        return tf.io.parse_single_example(serialized, {"number": tf.io.FixedLenFeature([], tf.int64)})

    def built():
        paths = record_files(compression="" if count_known else "GZIP")
        return plan_pipeline(paths, batch_size=4, seed=7, transform=parse)

    roomy = built()
    free_memory(0.0)
    tight = built()
    assert (roomy.to_dict()["cache"], tight.to_dict()["cache"]) == ("memory" if count_known else None, None)
    assert roomy.to_dict()["shuffle_buffer"] == tight.to_dict()["shuffle_buffer"]
    assert epochs(roomy.build()) == epochs(tight.build())


def test_the_global_seed_changes_nothing(record_files):
    plans = [
        plan_pipeline(ROWS, batch_size=8, seed=7, transform=double, augment=add_noise),
        plan_pipeline(record_files(), batch_size=8, seed=7),
    ]
    for plan in plans:
        without = epochs(plan.build())
        tf.random.set_seed(1)
        assert epochs(plan.build()) == without
        tf.random.set_seed(None)


@pytest.mark.slow
def test_a_seeded_dataset_keeps_its_functions_alive():
    def python(row):
        result = tf.py_function(lambda x: x, [row], tf.float32)
        result.set_shape(())
        return result

    dataset = build_pipeline(ROWS, batch_size=8, seed=7, transform=python, cache="memory")
    gc.collect()
    assert len(list(dataset)) == 6


def test_without_a_seed_two_builds_differ():
    plan = plan_pipeline(ROWS, batch_size=8, augment=add_noise)
    first, second = epochs(plan.build(), 1), epochs(plan.build(), 1)
    assert first != second


def test_each_element_of_each_epoch_has_its_own_seed():
    dataset = build_pipeline(ROWS, batch_size=50, augment=add_noise, seed=7)
    seeds = [tuple(seed) for epoch in epochs(dataset, 4) for seed in epoch[0][2]]
    assert len(set(seeds)) == len(seeds) == 200
    spec = dataset.element_spec[2]
    assert (spec.dtype, spec.shape.as_list()) == (tf.int32, [50, 2])


def test_seeds_do_not_depend_on_how_long_elements_take():
    """The first elements wait: with an order left free, later ones would overtake them."""

    def slow(row, *, seed):
        waited = tf.py_function(lambda x: (__import__("time").sleep(0.02 * float(x < 4)), x)[1], [row], tf.float32)
        waited.set_shape(())
        return waited, seed

    dataset = build_pipeline(ROWS, batch_size=10, augment=slow, seed=7)
    plain = build_pipeline(ROWS, batch_size=10, augment=lambda row, *, seed: (row, seed), seed=7)
    assert epochs(dataset, 2) == epochs(plain, 2)
