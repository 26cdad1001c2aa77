import gc
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.inspection import facts
from tfopt.pipelines.shared.seeding import part_seed
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


SETTINGS = [
    {},
    {"augment": add_noise},
    {"transform": double, "augment": add_noise},
    {"transform": double, "augment": add_noise, "cache": None},
    {"transform": double, "augment": add_noise, "shuffle": False, "remainder": "keep"},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", first_quick(SETTINGS, 2))
def test_two_builds_under_a_seed_agree_epoch_by_epoch(options):
    plan = plan_pipeline(ROWS, batch_size=8, seed=7, **options)
    first, second = epochs(plan.build()), epochs(plan_pipeline(ROWS, batch_size=8, seed=7, **options).build())
    assert first == second == epochs(plan.build())
    if options.get("shuffle", True) or "augment" in options:
        assert first[0] != first[1] != first[2] != first[0]
        assert first != epochs(build_pipeline(ROWS, batch_size=8, seed=8, **options))


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
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    here = epochs(build_pipeline(ROWS, batch_size=8, seed=7, transform=double, augment=add_noise))
    assert result.stdout.splitlines()[-1] == str(here)


@pytest.mark.slow
def test_files_read_side_by_side_under_a_seed_agree(photos, record_files):
    for source in (photos, record_files(), record_files(compression="GZIP")):
        plan = plan_pipeline(source, batch_size=3, seed=7)
        first = epochs(plan.build())
        assert first == epochs(plan.build())
        assert first[0] != first[1]


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


def test_parts_have_unlike_seeds():
    seeds = [part_seed(7, part) for part in ("files", "shuffle", "augment")]
    assert len(set(seeds)) == 3
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert part_seed(None, "files") is None
    assert seeds == [part_seed(7, part) for part in ("files", "shuffle", "augment")]
    assert part_seed(2**70, "shuffle") != part_seed(2**70 + 1, "shuffle")
