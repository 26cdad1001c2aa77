import os

import pytest

from tfopt.callbacks.shared import rotated_files as rotation
from tfopt.callbacks.shared.rotated_files import RotatedLines


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rotation, "ROTATE_BYTES", 20)
    monkeypatch.setattr(rotation, "KEPT_FILES", 3)


def write(path, numbers, header=None):
    file = RotatedLines(path, header)
    for number in numbers:
        file.append(f"line {number:04}")  # 10 bytes with its line break: two make a full file
    file.close()


def numbers(path):
    return [int(line.split()[1]) for line in path.read_text().splitlines() if line != "header"]


def all_numbers(folder):
    files = [*sorted(folder.glob("log.*.csv"), reverse=True), folder / "log.csv"]
    return [number for file in files if file.exists() for number in numbers(file)]


def test_a_full_file_is_renamed_and_older_ones_count_up(tmp_path):
    write(tmp_path / "log.csv", range(7))
    found = {path.name: numbers(path) for path in tmp_path.iterdir()}
    assert found == {"log.csv": [6], "log.1.csv": [4, 5], "log.2.csv": [2, 3], "log.3.csv": [0, 1]}


def test_the_oldest_goes(tmp_path):
    write(tmp_path / "log.csv", range(11))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.1.csv", "log.2.csv", "log.3.csv", "log.csv"]
    assert all_numbers(tmp_path) == list(range(4, 11))


def test_each_file_has_the_header(tmp_path):
    write(tmp_path / "log.csv", range(5), "header")
    assert len(list(tmp_path.iterdir())) > 1
    assert {path.read_text().splitlines()[0] for path in tmp_path.iterdir()} == {"header"}
    assert all_numbers(tmp_path) == list(range(5))


def test_a_restart_goes_on_in_the_current_file(tmp_path):
    write(tmp_path / "log.csv", range(3), "header")
    write(tmp_path / "log.csv", range(3, 5), "header")
    assert all_numbers(tmp_path) == list(range(5))
    assert [path.read_text().count("header") for path in tmp_path.iterdir()] == [1, 1, 1]


@pytest.mark.parametrize("kill_at", range(4))
def test_a_kill_between_two_renames_loses_no_line(tmp_path, monkeypatch, kill_at):
    """Of four files, three are renamed and one overwritten; each next rename is where the kill comes."""
    write(tmp_path / "log.csv", range(6))  # log, log.1, log.2: one number is free
    replace, renames = os.replace, iter(range(9))

    def killed(source, target):
        if next(renames) == kill_at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(rotation.os, "replace", killed)
    if kill_at < 3:
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "log.csv", [6])
        monkeypatch.setattr(rotation.os, "replace", replace)
        assert all_numbers(tmp_path) == list(range(6))
    write(tmp_path / "log.csv", [6])
    assert all_numbers(tmp_path) == list(range(7))


def test_a_kill_before_the_new_file_is_begun(tmp_path):
    write(tmp_path / "log.csv", range(2), "header")
    os.replace(tmp_path / "log.csv", tmp_path / "log.1.csv")
    write(tmp_path / "log.csv", [2], "header")
    assert all_numbers(tmp_path) == [0, 1, 2]


def test_a_file_that_was_deleted_is_noticed(tmp_path):
    file = RotatedLines(tmp_path / "log.csv")
    file.append("line 0000")
    (tmp_path / "log.csv").unlink()
    with pytest.raises(FileNotFoundError):
        file.append("line 0001")
    file.close()
