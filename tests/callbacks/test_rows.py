import csv
import json
import logging
import os
import resource

import pytest

from tfopt.callbacks.rows import RowWriter

FIELDS = ("step", "reasons", "value")


def write(folder, rows, formats=("csv", "jsonl"), fields=FIELDS):
    writer = RowWriter(folder, "log", formats, fields)
    for row in rows:
        writer.write(dict(zip(fields, row, strict=True)))
    writer.close()


def read(folder, name="log"):
    with open(folder / f"{name}.csv", newline="") as file:
        rows = list(csv.reader(file))
    lines = (folder / f"{name}.jsonl").read_text().splitlines() if (folder / f"{name}.jsonl").exists() else []
    return rows, [json.loads(line) for line in lines]


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
    writer = RowWriter(tmp_path, "log", ("jsonl",), ("step", "text"))
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


@pytest.mark.parametrize("content", [b"a,b\n1,2\n3,4", b"no line", "caf\xe9;x\n1".encode("latin-1"), b"\xff\xfe\n"])
def test_another_file_of_that_name_is_left_alone(tmp_path, content):
    (tmp_path / "log.csv").write_bytes(content)
    write(tmp_path, [(1, None, 1.0)])
    assert (tmp_path / "log.csv").read_bytes() == content
    assert read(tmp_path, "log-2")[0] == [list(FIELDS), ["1", "", "1.0"]]


def test_a_row_that_comes_after_closing_is_dropped(tmp_path):
    writer = RowWriter(tmp_path, "log", ("csv", "jsonl"), FIELDS)
    writer.close()
    writer.write({"step": 1, "reasons": None, "value": None})
    assert (tmp_path / "log.jsonl").read_text() == ""


@pytest.mark.parametrize("formats", [("csv",), ("csv", "jsonl")])
def test_a_folder_that_cannot_be_made_is_survived(tmp_path, caplog, formats):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "tfopt"):
        write(tmp_path / "file", [(1, None, 1.0)], formats)
    assert len(caplog.records) == len(formats)
