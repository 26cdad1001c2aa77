"""Faults of record files, tried on whole pipelines and with real processes."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, records
from tfopt.pipelines.tfrecords.format import INDEX_NAME
from tfopt.pipelines.tfrecords.verify import verify_records
from tfopt.pipelines.write import write_records

ROOT = Path(__file__).parents[3]
COUNT = 6
KILLS = [pytest.param(seed, marks=pytest.mark.slow if seed < 2 else pytest.mark.campaign) for seed in range(22)]
WRITER = """
import sys, time
import tensorflow as tf
from tfopt.errors import PipelineError
from tfopt.pipelines.write import write_records

def rows():
    for number in range(400):
        time.sleep(0.001)
        yield [number] * 1000

dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((1000,), tf.int64))
dataset = dataset.apply(tf.data.experimental.assert_cardinality(400))
print("writing", flush=True)
try:
    write_records(dataset, sys.argv[1], shards=5)
    print("written")
except PipelineError as error:
    print(error)
"""


@pytest.fixture
def folder(tmp_path):
    """Writes a folder of COUNT examples in 2 shards; returns its path."""

    def write(compression):
        write_records(np.arange(COUNT), tmp_path / "shards", shards=2, compression=compression)
        return tmp_path / "shards"

    return write


def read_or_refuse(folder, training, seed=None):
    """The examples that a pipeline on the folder gives, None where it ends in an error."""
    try:
        pipeline = build_pipeline(records(folder), batch_size=2, training=training, seed=seed, cache=None)
        return sorted(int(number) for batch in pipeline for number in batch)
    except (PipelineError, tf.errors.DataLossError, tf.errors.FailedPreconditionError):
        return None


def faults(path):
    """Every flipped byte and every cut of a file, as contents."""
    whole = path.read_bytes()
    for position in range(len(whole)):
        yield whole[:position] + bytes([whole[position] ^ 1 << position % 8]) + whole[position + 1 :]
        yield whole[:position]


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("tried", [25, pytest.param(None, marks=pytest.mark.campaign)])
def test_no_fault_of_a_shard_is_served(folder, compression, tried):
    path = sorted(folder(compression).glob("*.tfrecord*"))[1]
    whole, every = path.read_bytes(), list(faults(path))
    for contents in every if tried is None else random.Random(0).sample(every, tried):
        path.write_bytes(contents)
        found = read_or_refuse(path.parent, training=False)
        # Bytes of gzip's header, such as the time, may change and leave the data alone.
        assert found is None or (compression == "GZIP" and found == list(range(COUNT)))
        path.write_bytes(whole)


def test_no_fault_of_the_index_is_served(folder):
    path = folder(None) / INDEX_NAME
    whole = path.read_bytes()
    for contents in random.Random(0).sample(list(faults(path)), 200):
        path.write_bytes(contents)
        try:
            records(path.parent)
        except PipelineError:
            continue
        pytest.fail(f"read: {contents!r}")
    path.write_bytes(whole)
    assert records(path.parent).count == COUNT


@pytest.mark.parametrize("compression", [None, "GZIP"])
@pytest.mark.parametrize("training", [True, False])
def test_a_shard_cut_between_planning_and_reading_is_never_served(folder, compression, training):
    path = sorted(folder(compression).glob("*.tfrecord*"))[1]
    pipeline = build_pipeline(records(path.parent), batch_size=2, training=training, seed=3, cache=None)
    whole = path.read_bytes()
    for length in (0, len(whole) // 3, len(whole) // 2):  # three records of one size: one cut is between two
        path.write_bytes(whole[:length])
        with pytest.raises((tf.errors.DataLossError, tf.errors.FailedPreconditionError)):
            list(pipeline)


def start(target, **options):
    """A process that writes 400 examples there."""
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WRITER, str(target)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, **pipes, **options)


@pytest.mark.parametrize("seed", KILLS)
def test_a_writer_killed_at_any_moment_leaves_all_or_nothing(tmp_path, seed):
    target = tmp_path / "target"
    with start(target) as writer:
        assert writer.stdout.readline() == "writing\n"
        time.sleep(random.Random(seed).uniform(0, 1.5))
        writer.send_signal(signal.SIGKILL)
        ended = "written" in writer.stdout.read()
    assert set(os.listdir(tmp_path)) <= {"target", ".target.writing", "cache"}
    count = 400
    if not (target.exists() and os.listdir(target)):
        assert not ended
        count = write_records(np.arange(3), target).count
        assert not (tmp_path / ".target.writing").exists()
    assert verify_records(target).passed
    assert records(target).count == count


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_and_says_so(tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))

    with start(tmp_path / "deep" / "target", preexec_fn=limit) as writer:
        out, err = writer.communicate()
    assert "Expected to write" in out, err
    assert "nothing of it is left" in out
    assert "File too large" in out
    assert os.listdir(tmp_path / "deep") == []
