import datetime
import os
import time

import numpy as np
import pytest

from tfopt.pipelines import clear_cache
from tfopt.pipelines.cache.folder import (
    INDEX,
    ROWS,
    TABLE,
    Lock,
    Reader,
    Writer,
    default_folder,
    free_bytes,
    make_room,
    read_index,
    whole_caches,
)
from tfopt.pipelines.shared.paths import kept_of_images


def key(letter):
    return "tfopt-" + letter * 64


def write(folder, letter, row):
    writer = Writer(folder, key(letter), 1)
    writer.write(np.array([0]), np.array([row], object), np.zeros((1, 8), np.uint8))
    return writer


def publish(folder, letter, size=1000, age_days=0.0):
    """A cache with one row; returns what it takes."""
    lock = Lock.take(folder, key(letter))
    writer = write(folder, letter, bytes(size))
    writer.publish("a test")
    lock.release()
    used = time.time() - 24 * 3600 * age_days
    os.utime(folder / key(letter) / INDEX, (used, used))
    return sum((folder / key(letter) / name).stat().st_size for name in (ROWS, TABLE))


def left(folder):
    return "".join(cache.path.name[-1] for cache in whole_caches(folder))


def test_all_are_removed_and_nothing_else(tmp_path):
    freed = publish(tmp_path, "a") + publish(tmp_path, "b")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / INDEX).write_text('{"format": 1, "count": 0, "rows": 1, "bytes": 0}')
    (tmp_path / "mine" / ROWS).write_text("")
    (tmp_path / "notes.txt").write_text("")
    assert clear_cache(tmp_path) == freed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "notes.txt"]
    assert clear_cache(tmp_path) == 0


def test_those_used_lately_stay(tmp_path):
    publish(tmp_path, "a", age_days=11)
    publish(tmp_path, "b", age_days=9)
    clear_cache(tmp_path, older_than=datetime.timedelta(days=10))
    assert left(tmp_path) == "b"


def test_the_least_recently_used_go_first(tmp_path):
    for letter, age in zip("abcd", (2, 4, 1, 3), strict=True):
        size = publish(tmp_path, letter, age_days=age)
    assert clear_cache(tmp_path, keep_gib=2.5 * size / 2**30) == 2 * size
    assert left(tmp_path) == "ac"


def test_what_dead_writers_left_is_removed_and_what_is_written_stays(tmp_path):
    dead = tmp_path / f"{key('a')}.writing-x"
    dead.mkdir()
    (dead / ROWS).write_text("12345")
    lock = Lock.take(tmp_path, key("b"))
    writer = write(tmp_path, "b", b"x")
    assert clear_cache(tmp_path) == 5
    assert not dead.exists()
    writer.publish("a test")
    lock.release()
    assert left(tmp_path) == "b"


def test_the_default_folder_is_the_users(tmp_path, monkeypatch):
    publish(default_folder(), "a")
    assert default_folder() == tmp_path / "cache" / "tfopt" / "pipelines"
    assert clear_cache() > 0
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert str(default_folder()) == "/somewhere/.cache/tfopt/pipelines"


def test_what_was_found_of_images_goes_with_the_default_folder(tmp_path):
    kept = kept_of_images() / "a.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("[1]")
    assert clear_cache(tmp_path) == clear_cache(keep_gib=0) == clear_cache(older_than=datetime.timedelta(1)) == 0
    assert kept.exists()
    assert clear_cache() == 3
    assert not kept.exists()


WRONG_TYPE = "Expected .* Received: .* Pass "
TOO_SMALL = "to be (at least 0|a finite number)"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"folder": 3}, TypeError, WRONG_TYPE),
        ({"folder": ""}, TypeError, WRONG_TYPE),
        ({"keep_gib": "a"}, TypeError, WRONG_TYPE),
        ({"keep_gib": True}, TypeError, WRONG_TYPE),
        ({"older_than": 30}, TypeError, "Expected a datetime.timedelta.*Received: 30"),
        ({"older_than": -datetime.timedelta(1)}, ValueError, f"Expected older_than {TOO_SMALL}"),
        ({"keep_gib": -0.1}, ValueError, f"Expected keep_gib {TOO_SMALL}"),
        ({"keep_gib": float("nan")}, ValueError, f"Expected keep_gib {TOO_SMALL}"),
    ],
)
def test_wrong_arguments_are_refused_and_remove_nothing(tmp_path, arguments, error, text):
    publish(tmp_path, "a")
    with pytest.raises(error, match=text):
        clear_cache(**({"folder": tmp_path} | arguments))
    assert left(tmp_path) == "a"


def test_room_is_made_under_a_limit(tmp_path):
    for letter, age in zip("abc", (3, 2, 1), strict=True):
        size = publish(tmp_path, letter, age_days=age)
    make_room(tmp_path, key("d"), size, None)
    assert left(tmp_path) == "abc"
    make_room(tmp_path, key("d"), size, 3 * size)
    assert left(tmp_path) == "bc"
    with pytest.raises(OSError, match="exceed the limit"):
        make_room(tmp_path, key("d"), 4 * size, 3 * size)
    assert left(tmp_path) == "bc"


def test_what_does_not_fit_on_the_disk_is_not_begun(tmp_path):
    with pytest.raises(OSError, match="do not fit on the disk"):
        make_room(tmp_path, key("a"), 2**60, None)
    assert 0 < free_bytes(tmp_path / "not" / "there") < 2**60


def test_a_lock_keeps_others_out_until_it_is_released(tmp_path):
    first = Lock.take(tmp_path, key("a"))
    assert Lock.take(tmp_path, key("a")) is None
    assert Lock.take(tmp_path, key("b")) is not None
    first.release()
    first.release()
    assert Lock.take(tmp_path, key("a")) is not None


def test_rows_that_are_written_again_count_once(tmp_path):
    """In one call and in several, as a mixture reads a small part."""
    writer = Writer(tmp_path, key("a"), 5)
    for positions in ([3, 1, 3], [1, 0], [4, 4, 3]):
        rows = np.array([[position] * 2 for position in positions], np.uint8)
        writer.write(np.array(positions), rows, np.zeros((len(positions), 8), np.uint8))
    assert writer.count == 4
    writer.write(np.array([2]), np.array([[2, 2]], np.uint8), np.ones((1, 8), np.uint8))
    assert writer.count == 5
    writer.publish("a test")
    reader = Reader(tmp_path / key("a"), read_index(tmp_path / key("a")))
    rows, sums = reader.read(2, np.arange(5))
    assert rows.tolist() == [[position] * 2 for position in range(5)]
    assert sums[:, 0].tolist() == [0, 0, 1, 0, 0]


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path):
    lock = Lock.take(tmp_path, key("a"))
    writer = write(tmp_path, "a", b"x")
    del writer, lock
    assert not list(tmp_path.glob("*.writing-*"))
    assert Lock.take(tmp_path, key("a")) is not None


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"Expected folder to be a folder\b.*which is a file"):
        clear_cache(tmp_path / "file")
