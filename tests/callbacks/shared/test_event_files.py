import resource
import sys

import pytest

from tfopt.callbacks import UtilizationLogger
from tfopt.callbacks.shared import rotated_files as event_files
from tfopt.callbacks.shared.rotated_files import EventFile
from tfopt.errors import UnsupportedError


@pytest.fixture
def read():
    """What TensorBoard finds in a folder: value by step of each curve."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(folder):
        found = accumulator.EventAccumulator(str(folder)).Reload()
        return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}

    return read


def write(folder, steps, tag="gpu0/power"):
    file = EventFile(folder)
    for step in steps:
        file.append(step, 1_700_000_000.0 + step, {tag: step / 2})
    file.close()
    return file.path


def test_tensorboard_reads_the_curves(tmp_path, read):
    file = EventFile(tmp_path)
    file.append(3, 1_700_000_000.0, {"gpu0/power": 500.0, "host/cpu": 12.5})
    file.append(2**40, 1_700_000_001.0, {"gpu0/power": 0.25})
    file.close()
    assert read(tmp_path) == {"gpu0/power": [(3, 500.0), (2**40, 0.25)], "host/cpu": [(3, 12.5)]}


def test_a_second_run_has_a_file_of_its_own(tmp_path, read):
    assert write(tmp_path, [1, 2]) != write(tmp_path, [3])
    assert len(list(tmp_path.iterdir())) == 2
    assert {step for step, _ in read(tmp_path)["gpu0/power"]} >= {3}


def test_each_event_is_there_at_once(tmp_path, read):
    file = EventFile(tmp_path)
    file.append(1, 1_700_000_000.0, {"gpu0/power": 1.0})
    assert read(tmp_path)["gpu0/power"] == [(1, 1.0)]  # as a kill would leave it
    file.close()


def test_a_large_file_is_followed_by_the_next_and_the_oldest_goes(tmp_path, read, monkeypatch):
    monkeypatch.setattr(event_files, "ROTATE_BYTES", 100)
    monkeypatch.setattr(event_files, "KEPT_FILES", 2)
    last = write(tmp_path, range(20))
    files = sorted(tmp_path.iterdir(), key=lambda path: int(path.suffix[1:]))
    assert (len(files), files[-1]) == (3, last)
    assert max(path.stat().st_size for path in files) < 200
    assert read(tmp_path)["gpu0/power"][-1] == (19, 9.5)


def test_a_full_disk_leaves_whole_events(tmp_path, read):
    file = EventFile(tmp_path)
    file.append(1, 1_700_000_000.0, {"gpu0/power": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.path.stat().st_size + 10, before[1]))
    try:
        with pytest.raises(OSError, match="only 10 of"):
            file.append(2, 1_700_000_001.0, {"gpu0/power": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    file.append(3, 1_700_000_002.0, {"gpu0/power": 3.0})
    file.close()
    assert read(tmp_path)["gpu0/power"] == [(1, 1.0), (3, 3.0)]


def test_a_folder_that_vanished_is_noticed(tmp_path, read):
    file = EventFile(tmp_path / "run")
    file.path.unlink()
    with pytest.raises(FileNotFoundError):
        file.append(1, 1_700_000_000.0, {"gpu0/power": 1.0})
    file.close()


def test_tensorboard_that_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UnsupportedError, match=r"pip install 'tfopt\[tensorboard\]'"):
        UtilizationLogger(tmp_path, formats=("csv", "tensorboard"))
