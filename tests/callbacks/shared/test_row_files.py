import csv
import errno
import fcntl
import json
import logging
import math
import os
import resource
import threading

import pytest
from quick import first_quick

from tfopt import warn
from tfopt.callbacks.shared import rotated_files
from tfopt.callbacks.shared.row_files import FORMATS, BackgroundRows, RowWriter, check_formats

FIELDS = ("step", "reasons", "value")


@pytest.fixture(autouse=True)
def _forgotten_warnings():
    warn.forget_warnings()


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def opened(*arguments):
    writer = RowWriter(*arguments)
    writer.open()
    return writer


def write(folder, rows, formats=("csv", "jsonl"), fields=FIELDS):
    writer = opened(folder, "log", formats, fields)
    for row in rows:
        writer.write(dict(zip(fields, row, strict=True)))
    writer.close()


def read(folder, name="log"):
    with open(folder / f"{name}.csv", newline="") as file:
        rows = list(csv.reader(file))
    lines = (folder / f"{name}.jsonl").read_text().splitlines() if (folder / f"{name}.jsonl").exists() else []
    return rows, [json.loads(line) for line in lines]


def test_each_logger_in_a_folder_is_named_when_the_disk_is_full(tmp_path, monkeypatch, caplog):
    def full(self, line):
        raise OSError(errno.ENOSPC, "No space left on device")

    writers = [opened(tmp_path, name, ("jsonl",), ("step",)) for name in ("utilization", "throughput")]
    monkeypatch.setattr(rotated_files.RotatedLines, "append", full)
    for writer in writers:
        writer.write({"step": 1})
        writer.write({"step": 2})
        writer.close()
    found = [record.getMessage() for record in caplog.records]
    assert [f"{name}.jsonl" in text for name, text in zip(("utilization", "throughput"), found, strict=True)] == [
        True
    ] * 2


def test_each_logger_of_a_second_run_is_named(tmp_path, caplog):
    writers = [opened(tmp_path, name, ("jsonl",), ("step",)) for name in ("one", "one", "two", "two")]
    for writer in writers:
        writer.close()
    found = [record.getMessage() for record in caplog.records]
    assert [f"{name}.jsonl" in text for name, text in zip(("one", "two"), found, strict=True)] == [True] * 2


def test_unknown_is_empty_or_null_and_never_zero(tmp_path):
    write(tmp_path, [(1, ["power_cap", "thermal"], None), (2, None, 0.5), (3, [], 0)])
    rows, objects = read(tmp_path)
    assert rows == [["step", "reasons", "value"], ["1", "power_cap|thermal", ""], ["2", "", "0.5"], ["3", "", "0"]]
    assert [row["value"] for row in objects] == [None, 0.5, 0]
    assert [row["reasons"] for row in objects] == [["power_cap", "thermal"], None, []]


def test_a_second_run_continues_the_file(tmp_path):
    write(tmp_path, [(1, None, 1.0)])
    write(tmp_path, [(2, None, 2.0)])
    rows, objects = read(tmp_path)
    assert [row[0] for row in rows] == ["step", "1", "2"]
    assert [row["step"] for row in objects] == [1, 2]


def test_a_line_cut_by_a_kill_is_removed(tmp_path):
    write(tmp_path, [(1, None, 1.0), (2, None, 2.0)])
    for name in ("log.csv", "log.jsonl"):
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 3)
    write(tmp_path, [(3, None, 3.0)])
    rows, objects = read(tmp_path)
    assert [row[0] for row in rows] == ["step", "1", "3"]
    assert [row["step"] for row in objects] == [1, 3]


def test_other_columns_go_into_a_file_of_their_own(tmp_path):
    write(tmp_path, [(1, None, 1.0)])
    write(tmp_path, [("a", "b")], formats=("csv",), fields=("x", "y"))
    write(tmp_path, [("c", "d")], formats=("csv",), fields=("x", "y"))
    assert read(tmp_path)[0] == [list(FIELDS), ["1", "", "1.0"]]
    assert read(tmp_path, "log-2")[0] == [["x", "y"], ["a", "b"], ["c", "d"]]


def test_a_full_disk_is_survived_and_leaves_whole_lines(tmp_path, caplog):
    writer = opened(tmp_path, "log", ("jsonl",), ("step", "text"))
    writer.write({"step": 1, "text": ""})
    size = (tmp_path / "log.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))  # Python ignores SIGXFSZ
    try:
        with caplog.at_level(logging.WARNING, "tfopt"):
            for step in (2, 3):
                writer.write({"step": step, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1, "text": ""}\n'
    assert len(caplog.records) == 1
    assert "Free the disk" in caplog.text


def test_a_full_disk_is_one_cause_for_all_files(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    writer = opened(tmp_path, "log", ("csv", "jsonl", "tensorboard"), ("time_seconds", "step", "text"))
    row = {"time_seconds": 1.0, "step": 1, "text": "x" * 100}
    writer.write(row)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, before[1]))
    try:
        with caplog.at_level(logging.WARNING, "tfopt"):
            writer.write(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.write(row)
    writer.close()
    assert len(caplog.records) == 1
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("content", [b"a,b\n1,2\n3,4", b"no line", "caf\xe9;x\n1".encode("latin-1"), b"\xff\xfe\n"])
def test_another_file_of_that_name_is_left_alone(tmp_path, content):
    (tmp_path / "log.csv").write_bytes(content)
    write(tmp_path, [(1, None, 1.0)])
    assert (tmp_path / "log.csv").read_bytes() == content
    assert read(tmp_path, "log-2")[0] == [list(FIELDS), ["1", "", "1.0"]]


def test_a_folder_that_cannot_be_made_is_survived(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "tfopt"):
        write(tmp_path / "file", [(1, None, 1.0)])
    assert len(caplog.records) == 1


def test_tensorboard_shows_the_numbers_of_a_row(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    columns = ("time_seconds", "epoch", "step", "step_time_ms", "optimizer", "loss_scale")
    given = [(1e9, 0, 50, 2.5, "optimizer", None), (1e9, 1, 60, 3.5, "optimizer", math.inf), (1e9, 2, 69, None, "", 8)]
    writer = opened(tmp_path, "throughput", ("tensorboard",), columns)
    for row in given:
        writer.write(dict(zip(columns, row, strict=True)))
    writer.write({"time_seconds": 2e9, "step": 70}, curves={"gpu0/power": 9, "gpu0/unknown": None})
    writer.close()
    seen = accumulator.EventAccumulator(str(tmp_path / "throughput")).Reload()
    found = {name: [(one.step, one.value) for one in seen.Scalars(name)] for name in seen.Tags()["scalars"]}
    assert found == {
        "throughput/step_time_ms": [(50, 2.5), (60, 3.5)],
        "throughput/loss_scale": [(69, 8.0)],
        "gpu0/power": [(70, 9.0)],
    }
    assert seen.Scalars("gpu0/power")[0].wall_time == 2e9


def test_a_format_that_is_named_twice_is_written_once(tmp_path):
    assert check_formats(["csv", "jsonl", "csv"]) == ("csv", "jsonl")


def test_each_of_several_workers_has_its_own_files(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    cluster = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    writer = opened(tmp_path, "log", FORMATS, ("time_seconds", "step"))
    writer.write({"time_seconds": 1.0, "step": 1})
    writer.close()
    assert {path.name for path in tmp_path.iterdir()} == {"log-worker1.csv", "log-worker1.jsonl", "log-worker1"}


def test_a_tensorboard_that_cannot_be_imported_is_survived(tmp_path, monkeypatch, caplog):
    def fails(self, folder):
        raise TypeError("Descriptors cannot be created directly.")  # protobuf's, of another version

    monkeypatch.setattr(rotated_files.EventFile, "__init__", fails)
    write(tmp_path, [(1, None, 1.0)], ("tensorboard", "csv"))
    assert len(caplog.records) == 1
    assert read(tmp_path)[0] == [list(FIELDS), ["1", "", "1.0"]]


@pytest.mark.parametrize("formats", [None, 1])
def test_formats_that_are_no_names(formats):
    with pytest.raises(TypeError, match=r"Expected formats to be a sequence of names\. Received: .* Choose from"):
        check_formats(formats)


@pytest.mark.parametrize("hanging", ["open", "write"])
def test_nothing_waits_for_a_disk_that_hangs(tmp_path, monkeypatch, caplog, hanging):
    """Beginning, writing and closing go on while the disk hangs; once it works again, all rows are there."""
    monkeypatch.setattr("tfopt.callbacks.shared.background.Background.close.__defaults__", (0.01,))
    may_go_on, act = threading.Event(), getattr(os, hanging)
    trainings = threading.current_thread()

    def hangs(target, *arguments):
        if isinstance(target, int) or str(target).startswith(str(tmp_path)):
            assert threading.current_thread() is not trainings
            assert may_go_on.wait(20)
        return act(target, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, hanging, hangs)
        writer = BackgroundRows(tmp_path, "pace", ("jsonl", "csv"), ("time_seconds", "step"))
        for step in range(100):
            writer.write({"time_seconds": 0.0, "step": step})
        writer.close()  # waits for as long as it was told, and says so
        writer.write({"time_seconds": 0.0, "step": 100})
        assert len(caplog.records) == 1
        assert "Expected the pace log to finish within 0.01 s" in caplog.text
        may_go_on.set()
        writer._background._thread.join(20)
    rows, objects = read(tmp_path, "pace")
    assert [row["step"] for row in objects] == list(range(100))
    assert [row[1] for row in rows] == ["step", *map(str, range(100))]
    assert writer._writer._files == {}  # closed


def writes_as_told(folder, run, told, tells, caplog):
    """Runs in a process of its own; returns how often it said that it is not alone."""
    writer = opened(folder, "log", ("csv", "jsonl"), ("run", "step", "text"))
    os.write(tells, b"o")
    os.close(tells)
    os.read(told, 1)
    for step in range(1000):
        writer.write({"run": run, "step": step, "text": "x" * 100})
    writer.close()
    return caplog.text.count("Found another process, or another callback of this one")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.parametrize("number", first_quick([2, 8]))
def test_processes_that_write_into_one_folder_at_once(tmp_path, number, monkeypatch, caplog):
    """Each has files of its own, also while they are renamed, and no row is lost or mixed with another's."""
    monkeypatch.setattr(rotated_files, "ROTATE_BYTES", 20_000)
    monkeypatch.setattr(rotated_files, "KEPT_FILES", 100)
    (told, tell), (hear, tells) = os.pipe(), os.pipe()
    children = []
    for place in range(number):
        child = os.fork()
        if not child:
            alone = 99
            try:
                alone = writes_as_told(tmp_path, f"run{place}", told, tells, caplog)
            finally:
                os._exit(alone)
        children.append(child)
    os.close(tells)
    opened_by = sum(len(os.read(hear, 1)) for _ in children)  # all are there before the first row
    os.write(tell, b"g" * number)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert (opened_by, sorted(ended)) == (number, [0, *[1] * (number - 1)])
    for pipe in (told, tell, hear):
        os.close(pipe)
    for kind in ("csv", "jsonl"):
        seen = {}
        for file in tmp_path.glob(f"*.{kind}"):
            with open(file, newline="") as lines:
                found = list(csv.DictReader(lines)) if kind == "csv" else [json.loads(line) for line in lines]
            assert len({row["run"] for row in found}) == 1, "two processes in one file"
            seen.setdefault(found[0]["run"], []).extend(int(row["step"]) for row in found)
        assert {run: sorted(steps) for run, steps in seen.items()} == {
            f"run{place}": list(range(1000)) for place in range(number)
        }
    # Killed or ended, they hold nothing back: the next run continues the first files.
    write(tmp_path, [("next", 0, "")], fields=("run", "step", "text"))
    assert lines_of(tmp_path / "log.jsonl")[-1]["run"] == "next"


def test_two_writers_of_one_process(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    columns = ("time_seconds", "step")
    writers = [opened(tmp_path, "log", FORMATS, columns) for _ in range(2)]
    for step, writer in enumerate(writers):
        writer.write({"time_seconds": 1.0, "step": step}, curves={"curve": step})
    assert {path.name: len(lines_of(path)) for path in tmp_path.glob("*.jsonl")} == {"log.jsonl": 1, "log-2.jsonl": 1}
    assert [len(list((tmp_path / name).iterdir())) for name in ("log", "log-2")] == [1, 1]
    assert len(caplog.records) == 1
    for writer in writers:
        writer.close()


def test_a_file_system_that_cannot_lock(tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    write(tmp_path, [(1, None, 1.0)], FORMATS[:2])
    assert len(lines_of(tmp_path / "log.jsonl")) == 1


def test_a_file_that_was_replaced_is_noticed(tmp_path, caplog):
    writer = opened(tmp_path, "log", ("jsonl",), ("step",))
    (tmp_path / "other").write_text("theirs\n")
    os.replace(tmp_path / "other", tmp_path / "log.jsonl")
    writer.write({"step": 1})
    writer.close()
    assert (tmp_path / "log.jsonl").read_text() == "theirs\n"
    assert "it was replaced by another file" in caplog.text
