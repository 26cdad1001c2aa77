import os
import subprocess
import sys

import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.tfrecords import shards as module
from tfopt.pipelines.tfrecords.shards import ShardWriters, published


def read(path, compression=""):
    return [record.numpy() for record in tf.data.TFRecordDataset([str(path)], compression)]


def test_more_than_may_be_under_way_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PENDING_BYTES", 10)
    with ShardWriters(str(tmp_path), "") as writers:
        for shard in range(20):
            writers.begin()
            for _ in range(3):
                writers.put([b"x" * shard, b"y"])
        shards = writers.finish()
    assert [shard.count for shard in shards] == [6] * 20


@pytest.mark.timeout(60)
def test_nobody_waits_for_a_shard_that_failed(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PENDING_BYTES", 10)
    (tmp_path / "records-00001.tfrecord").mkdir()

    def put_until_it_fails(writers):
        while True:
            writers.put([b"x" * 10])

    def write():
        with ShardWriters(str(tmp_path), "") as writers:
            for _ in range(2):
                writers.begin()
                writers.put([b"x" * 10])
            for call in (put_until_it_fails, put_until_it_fails, ShardWriters.finish):
                with pytest.raises(tf.errors.FailedPreconditionError, match="Is a directory"):
                    call(writers)
            writers.put([])

    with pytest.raises(tf.errors.FailedPreconditionError, match="Is a directory"):
        write()


def test_an_error_of_the_caller_ends_the_threads(tmp_path):
    def write():
        with ShardWriters(str(tmp_path), "") as writers:
            writers.begin()
            writers.put([b"x"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) in ([], ["records-00000.tfrecord"])


HOLDER = """
import sys
from tfopt.pipelines.tfrecords.shards import published
with published(sys.argv[1]) as folder:
    open(folder + "/half", "w").close()
    print("writing", flush=True)
    sys.stdin.read()
"""


def write(folder, name="file"):
    with published(str(folder)) as temporary, open(os.path.join(temporary, name), "w"):
        assert not os.path.exists(os.path.join(folder, name))


@pytest.fixture
def holder(tmp_path):
    """Another process that is writing `tmp_path / "data"`."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "data")]
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.getcwd()}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


def test_a_folder_appears_when_it_is_whole(tmp_path):
    (tmp_path / "deep" / "data").mkdir(parents=True)
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "data").symlink_to(tmp_path / "deep" / "data")
    for name in ("new/data", "deep/data", "link/data"):
        if name == "link/data":
            (tmp_path / "deep" / "data" / "file").unlink()
        write(tmp_path / name)
        assert os.listdir(tmp_path / name) == ["file"]
        assert os.listdir((tmp_path / name).parent) == ["data"]
    assert os.listdir(tmp_path / "deep" / "data") == ["file"]


@pytest.mark.parametrize("kind", ["a file", "a folder", "a folder that appears meanwhile"])
def test_what_is_there_is_never_touched(tmp_path, kind):
    path = tmp_path / "data" if kind == "a file" else tmp_path / "data" / "file"

    def appear():
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")

    def write_slowly():
        with published(str(tmp_path / "data")):
            appear()

    if "meanwhile" not in kind:
        appear()
    with pytest.raises(PipelineError, match=r"new or empty folder.*Found something at '.*data'\. Remove it"):
        write_slowly()
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["data"]


@pytest.mark.slow
def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path, holder):
    with pytest.raises(PipelineError, match="Another process is writing it now"):
        write(tmp_path / "data")
    holder.communicate()
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(tmp_path / "data") == ["half"]


@pytest.mark.slow
def test_what_a_killed_writer_left_is_removed(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert os.listdir(tmp_path) == [".data.writing"]
    (tmp_path / ".data.writing" / "folder").mkdir()
    write(tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(tmp_path / "data") == ["file"]
