"""What a plan says that its pipeline takes in memory is what it takes."""

import pytest
from python_child import run_python
from quick import campaign, first_quick

COMMON = """
import sys
import numpy as np, tensorflow as tf
from tfopt.pipelines import build_pipeline, plan_pipeline

def large(row):
    return tf.fill((512, 1024), row)  # 2 MiB

def mib(kind):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) / 1024

PEAK = "VmHWM"  # not ru_maxrss, which a process inherits from the one that started it
OWN = "RssAnon"  # without mapped files
"""
EPOCH = """
from tfopt.pipelines.stages import batch_stages, order_stages

order_stages.SHUFFLE_MIB, batch_stages.AHEAD_MIB = 128, 64
plan = plan_pipeline(np.arange(400, dtype="float32"), batch_size=4, transform=large, **eval(sys.argv[1]))
for warm in plan_pipeline(np.arange(40, dtype="float32"), batch_size=4, transform=large, cache=None).build():
    pass
before = mib(PEAK)
dataset = plan.build()
for epoch in range(2):
    for batch in dataset:
        pass
print(plan.to_dict()["memory_mib"], mib(PEAK) - before)
"""
LOAD = """
from tfopt.pipelines.device.device_stage import stage_of

def load(count):
    numbers = np.arange(count, dtype="float32")
    stage = stage_of(build_pipeline(numbers, batch_size=4, transform=large, cache="device", training=False))
    assert [float(stage.batch(element)[0, 0, 0]) for element in stage.elements] == list(range(0, count, 4))

load(20)
before = mib(PEAK)
load(400)
print(mib(PEAK) - before)
"""
ROWS = """
from tfopt.pipelines.as_source import as_source

np.save("rows.npy", np.ones((100_000, 1000), "float32"))
source = as_source(np.load("rows.npy") if sys.argv[1] == "arrays" else "rows.npy")
before = mib(OWN)
held = []
for options in ({}, {"augment": lambda row: 2 * row}):
    dataset = build_pipeline(source, batch_size=10, prefetch=2, **options)
    held += [iter(dataset) for _ in range(2)]
    for iterator in held:
        next(iterator)
print(mib(OWN) - before)
"""


def run(code, tmp_path, *arguments):
    """Returns the numbers that some code prints in a process of its own."""
    # Freed blocks of 1 MB go back to the system at once; malloc would keep some, where TensorFlow runs without oneDNN.
    printed = run_python(COMMON + code, *arguments, cwd=tmp_path, MALLOC_MMAP_THRESHOLD_="1000000")
    return map(float, printed.split())


@pytest.mark.slow
def test_loading_takes_the_memory_of_the_examples_and_little_more(tmp_path):
    """800 MiB of them, which stay in host memory where there is no GPU."""
    (taken,) = run(LOAD, tmp_path)
    assert 800 < taken < 1.3 * 800


@pytest.mark.parametrize("source", first_quick(["arrays"], 0) + campaign(["npy"]))
def test_iterators_over_rows_do_not_copy_them(tmp_path, source):
    """They take 381 MiB."""
    (taken,) = run(ROWS, tmp_path, source)
    assert taken < 190


@pytest.mark.parametrize(
    ("options", "least"),
    first_quick([("{'cache': 'memory'}", 700), ("{'cache': './caches'}", 50)], 0) + campaign([("{'cache': None}", 0)]),
)
def test_an_epoch_stays_within_the_stated_budget(tmp_path, options, least):
    stated, taken = run(EPOCH, tmp_path, options)
    assert least <= taken < 1.1 * stated + 60  # and a few elements in the hands of maps
    assert stated < 1300
