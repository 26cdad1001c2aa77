"""Parts are disjoint and complete, and all processes count the same steps."""

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import Source, arrays, images, npy, records
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.sources import parts
from tfopt.pipelines.sources.parts import take_part

ROWS = np.arange(50)


@pytest.fixture
def place(monkeypatch):
    """Sets which process of how many this one is."""

    def set_place(index, processes):
        monkeypatch.setattr(parts, "_place", lambda: (index, processes))

    return set_place


@pytest.fixture
def sources(tmp_path, photos, record_files):
    """A source of each kind that has parts."""
    np.save(tmp_path / "rows.npy", ROWS)
    return {
        "arrays": arrays(ROWS),
        "npy": npy(tmp_path / "rows.npy"),
        "images": images(photos),
        "records": records(record_files(files=4)),
        "records, skip": records(record_files(files=5), on_bad_record="skip"),
    }


@pytest.mark.parametrize(
    ("name", "batch_size", "remainder", "steps", "chosen", "batches"),
    [
        # Five files of 10, of which the third process has one; and 40 records, divided equally.
        ("records, skip", 6, "keep", 10, "keep", 5),
        ("records, skip", 6, "drop", 5, "drop", 5),
        ("records", 6, "keep", 7, "keep", 7),
        ("records", 6, "drop", 6, "drop", 6),
        # By default little is left out.
        ("arrays", 6, None, 8, "drop", 8),  # 2 of 50 left out
        ("arrays", 9, None, 6, "keep", 6),  # 5 of 50
        ("arrays", 60, None, 1, "keep", 1),  # a process has 16
        ("records", 6, None, 7, "keep", 7),  # 4 of 40
        ("records, skip", 6, None, 10, "keep", 5),
        ("records, skip", 30, None, 2, "keep", 1),
    ],
)
def test_all_processes_take_the_steps_of_the_largest_part_or_of_the_smallest(
    place, sources, name, batch_size, remainder, steps, chosen, batches
):
    for index in range(3):
        place(index, 3)
        options = PipelineOptions(batch_size=batch_size, remainder=remainder, service="grpc://a:1")
        _, part = take_part(sources[name], options)
        assert (part.steps, part.last_batch[0]) == (steps, chosen)
    assert part.batches == batches


def gzipped(paths):
    with tf.io.TFRecordWriter(str(paths / "a.gz"), "GZIP") as writer, tf.io.TFRecordWriter(str(paths / "b.gz"), "GZIP"):
        writer.write(b"record")
    return records([str(paths / "a.gz")] * 3)


@pytest.mark.parametrize(
    ("source", "options", "error", "found"),
    [
        (arrays(ROWS), {"batch_size": 7}, ValueError, "batch_size that splits evenly .*Found: 7.*pass 6"),
        (arrays(ROWS), {"remainder": "pad"}, ValueError, "Found: 'pad'.*pass 'keep'"),
        (arrays(ROWS), {"device": "CPU:0"}, ValueError, "Found: 'CPU:0'.*leave it out"),
        (arrays(ROWS), {"batch_size": 51, "remainder": "drop"}, PipelineError, "Expected 17 examples in each.*has 16"),
        (arrays(ROWS[:2]), {}, PipelineError, "examples for each of 3 processes. Found: 2 in arrays"),
        (Source(name="own", dataset=lambda: None), {}, UnsupportedError, "Found: own.*a `part`"),
        (gzipped, {}, UnsupportedError, "known number of examples.*Found: records in 3 files.*write_records"),
    ],
)
def test_what_has_no_parts_is_refused(place, monkeypatch, tmp_path, source, options, error, found):
    place(0, 3)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: mock.Mock(num_replicas_in_sync=3))
    chosen = PipelineOptions(**{"batch_size": 6, "service": "grpc://a:1", **options})
    with pytest.raises(error, match=found):
        take_part(source(tmp_path) if callable(source) else source, chosen)


def test_fewer_files_than_processes_are_refused(sources):
    with pytest.raises(
        PipelineError, match=r"at least a file .* each of 6 processes\. Found: 5\. What to do: write as"
    ):
        sources["records, skip"].part(0, 6)


@pytest.mark.parametrize(
    ("job", "task", "place"), [("chief", 0, (0, 3)), ("worker", 1, (2, 3)), ("evaluator", 0, (0, 1))]
)
def test_places_are_those_of_the_processes_that_train(monkeypatch, job, task, place):
    spec = tf.train.ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["c:1"], "evaluator": ["d:1"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type=job, task_id=task)
    strategy = mock.Mock(spec=tf.distribute.MultiWorkerMirroredStrategy, cluster_resolver=resolver)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    assert parts._place() == place
