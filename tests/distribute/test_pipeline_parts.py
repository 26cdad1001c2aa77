"""`fit`, `evaluate` and `predict` on `build_pipeline` in several processes: each example once, and in order."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

SCRIPT = str(Path(__file__).parents[1] / "support" / "pipeline_parts.py")
ALL, BATCH = list(range(203)), 12
pytestmark = pytest.mark.slow  # real processes


def write_records(folder):
    """Writes the numbers into three files of unlike sizes."""
    numbers = iter(ALL)
    for name, size in (("a", 68), ("b", 104), ("c", 31)):
        with tf.io.TFRecordWriter(str(folder / f"{name}.tfrecord")) as writer:
            for _ in range(size):
                value = tf.train.Feature(int64_list=tf.train.Int64List(value=[next(numbers)]))
                features = tf.train.Features(feature={"number": value})
                writer.write(tf.train.Example(features=features).SerializeToString())


@pytest.fixture(scope="module", params=[2, 3])
def trained(request, tmp_path_factory):
    """What each of the processes saw."""
    folder = tmp_path_factory.mktemp("parts")
    write_records(folder)
    command = [sys.executable, "-m", "tfopt.distribute.launch", "-n", str(request.param), SCRIPT, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(request.param)]


@pytest.mark.parametrize("name", ["arrays", "records"])
def test_each_epoch_and_evaluation_see_each_example_once(trained, name):
    for epoch in range(2):
        assert sorted(number for each in trained for number in each[name]["epochs"][epoch]) == ALL
    assert sorted(number for each in trained for number in each[name]["evaluated"]) == ALL
    for each in trained:
        assert abs(len(each[name]["epochs"][0]) - len(ALL) / len(trained)) < 1  # and reads only its share
        assert each[name]["steps"] == 2 * 17


def test_full_batches_leave_out_what_they_say(trained):
    for epoch in range(2):
        found = [number for each in trained for number in each["full batches"]["epochs"][epoch]]
        assert len(found) == len(set(found)) == 16 * BATCH
    for each in trained:
        assert each["full batches"]["steps"] == 2 * 16
        assert f"of {len(ALL)} examples, {BATCH // len(trained)} of each batch" in each["full batches"]["plan"]


@pytest.mark.parametrize("name", ["arrays", "records", "full batches"])
def test_processes_agree_and_predict_in_the_order_of_the_source(trained, name):
    kernel, bias = (np.array(weight, "float64") for weight in trained[0][name]["weights"])
    outputs = (np.array(ALL) / len(ALL) * kernel.ravel() + bias).tolist()
    for each in trained:
        assert each[name]["weights"] == trained[0][name]["weights"]
        assert each[name]["loss"] == trained[0][name]["loss"]
        assert each[name]["predictions"] == pytest.approx(outputs, rel=1e-4, abs=1e-5)
        squares = [(output - number) ** 2 for output, number in zip(outputs, ALL, strict=True)]
        assert each[name]["evaluation loss"] == pytest.approx(np.mean(squares), rel=1e-5)


def test_what_would_lose_examples_is_refused(trained):
    for each in trained:
        assert "same order in each of several processes" in each["shuffled"]
        assert "inside the scope of the strategy of its" in each["outside"]
