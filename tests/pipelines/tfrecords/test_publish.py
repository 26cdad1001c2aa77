import os
import subprocess
import sys

import pytest

from tfopt.errors import PipelineError
from tfopt.pipelines.tfrecords.publish import published

HOLDER = """
import sys
from tfopt.pipelines.tfrecords.publish import published
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
    for name in ("new/data", "deep/data"):
        write(tmp_path / name)
        assert os.listdir(tmp_path / name) == ["file"]
        assert os.listdir((tmp_path / name).parent) == ["data"]


def test_a_folder_through_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "data").symlink_to(tmp_path / "there")
    write(tmp_path / "data")
    assert os.listdir(tmp_path / "there") == ["file"]


def test_an_error_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="mine"), published(str(tmp_path / "data")):
        raise RuntimeError("mine")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("as_file", [True, False])
def test_what_is_there_is_never_touched(tmp_path, as_file):
    path = tmp_path / "data" if as_file else tmp_path / "data" / "file"
    path.parent.mkdir(exist_ok=True)
    path.write_text("precious")
    with pytest.raises(PipelineError, match=r"new or empty folder.*Found something at '.*data'\. Remove it"):
        write(tmp_path / "data")
    assert path.read_text() == "precious"


def test_what_appears_meanwhile_is_never_touched(tmp_path):
    def write_slowly():
        with published(str(tmp_path / "data")):
            (tmp_path / "data").mkdir()
            (tmp_path / "data" / "file").write_text("precious")

    with pytest.raises(PipelineError, match="Found something"):
        write_slowly()
    assert (tmp_path / "data" / "file").read_text() == "precious"
    assert os.listdir(tmp_path) == ["data"]


def test_a_second_writer_is_refused_and_disturbs_nothing(tmp_path, holder):
    with pytest.raises(PipelineError, match="Another one is writing it now"):
        write(tmp_path / "data")
    holder.communicate()
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(tmp_path / "data") == ["half"]


def test_what_a_killed_writer_left_is_removed(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert os.listdir(tmp_path) == [".data.writing"]
    (tmp_path / ".data.writing" / "folder").mkdir()
    write(tmp_path / "data")
    assert os.listdir(tmp_path) == ["data"]
    assert os.listdir(tmp_path / "data") == ["file"]
