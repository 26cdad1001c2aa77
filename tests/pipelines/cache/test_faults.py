"""The cache under kills, full disks, damage and company: the data are always right, and no training ends of it."""

import json
import logging
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cached_job
import pytest
from quick import first_quick

from tfopt.pipelines.cache.folder import INDEX, ROWS, TABLE, read_index

ROOT = Path(__file__).parents[3]
# A kill costs a process that imports TensorFlow.
KILLS = [pytest.param(number, marks=pytest.mark.slow if number < 2 else pytest.mark.campaign) for number in range(20)]


def start(folder, epochs=1, **environment):
    """A job in a process of its own, which has begun."""
    job = subprocess.Popen(
        [sys.executable, cached_job.__file__, str(folder), str(epochs)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout.readline() == "begun\n", job.communicate()[1]
    return job


def serves(dataset):
    return cached_job.numbers(dataset) == cached_job.EXPECTED


@pytest.fixture
def cache(tmp_path):
    """A folder with a whole cache, and the cache in it."""
    folder = tmp_path / "caches"
    plan = cached_job.plan(folder)
    assert serves(plan.build())
    return Path(plan.to_dict()["cache"], plan.to_dict()["cache_key"])


@pytest.mark.parametrize("number", KILLS)
def test_a_writer_that_is_killed_blocks_nothing(tmp_path, number, caplog):
    job = start(tmp_path, epochs=3, PAUSE="0.002")
    time.sleep(random.Random(number).uniform(0, 1.0))  # an epoch takes over 0.3 s, and is written at its end
    job.kill()
    job.communicate()
    plan = cached_job.plan(tmp_path)
    for _ in range(2):
        assert serves(plan.build())
    key = plan.to_dict()["cache_key"]
    # One that was killed between publishing and unlocking leaves its lock, which holds nobody up.
    assert {path.name for path in tmp_path.iterdir()} - {f"{key}.lock"} == {key}
    assert read_index(tmp_path / key)["count"] == cached_job.COUNT
    assert not caplog.records


@pytest.mark.slow
def test_two_jobs_with_one_cache(tmp_path, caplog):
    writer = start(tmp_path, PAUSE="0.02")
    while not list(tmp_path.glob("*.writing-*")):
        assert writer.poll() is None
    plan = cached_job.plan(tmp_path)
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert serves(plan.build())
    assert "writes the cache" in caplog.text
    assert writer.communicate()[0] == "right\n"
    assert read_index(tmp_path / plan.to_dict()["cache_key"])["count"] == cached_job.COUNT
    assert serves(plan.build())


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1000, 70_000])
def test_a_disk_that_is_full(tmp_path, limit):
    job = start(tmp_path, epochs=2, FILE_LIMIT=str(limit))
    output, errors = job.communicate()
    assert output == "right\n" * 2, errors
    assert errors.count("Cannot write the cache") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [ROWS, TABLE])
@pytest.mark.parametrize("share", first_quick([0.3, 0.0, 0.999]))
def test_a_flipped_byte(cache, name, share, caplog):
    file = cache / name
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 1
    file.write_bytes(data)
    dataset = cached_job.plan(cache.parent).build()
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert serves(dataset)
    assert ("is damaged" in caplog.text) is (name == ROWS)  # without its table there is no cache
    assert serves(dataset)  # has written it anew
    assert read_index(cache) is not None
    assert bytes(data) != file.read_bytes()


@pytest.mark.slow
def test_what_comes_before_the_damage_is_read_and_the_rest_computed(cache, monkeypatch, caplog):
    monkeypatch.setattr("tfopt.pipelines.cache.cached_dataset._LEAST_BYTES", 1)  # a batch at a time
    with open(cache / ROWS, "rb+") as file:
        file.seek(155 * cached_job.ROW_BYTES)
        file.write(b"\1\2\3")
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert serves(cached_job.plan(cache.parent).build())
    assert "is damaged: after 150 examples" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 2]])
def test_rows_out_of_place(cache, order, caplog):
    rows, size = cache / ROWS, cached_job.ROW_BYTES
    whole = rows.read_bytes()
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    parts[:2] = [parts[index] for index in order]
    rows.write_bytes(b"".join(parts))
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert serves(cached_job.plan(cache.parent).build())
    assert "is damaged" in caplog.text


def cut_to(length):
    return lambda path: os.truncate(path, length)


def with_text(text):
    return lambda path: path.write_text(text)


def with_values(**values):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


NOT_WHOLE = {
    "rows cut between two": (ROWS, cut_to(cached_job.ROW_BYTES * 29)),
    "rows emptied": (ROWS, cut_to(0)),
    "table cut": (TABLE, cut_to(1200)),
    "index emptied": (INDEX, with_text("")),
    "index cut": (INDEX, with_text('{"format": 1')),
    "index of NULs": (INDEX, with_text("\0")),
    "index without values": (INDEX, with_text("{}")),
    "index of a list": (INDEX, with_text("[]")),
    "index of texts": (INDEX, with_text('{"format": 1, "count": "300", "bytes": 177600}')),
    # The count alone says where the last record ends, if the pipeline does not know.
    "another count": (INDEX, with_values(count=290)),
    "another size": (INDEX, with_values(bytes=310)),
    "another table": (INDEX, with_values(table=0)),
    **{f"no {name}": (name, Path.unlink) for name in (INDEX, ROWS, TABLE)},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", NOT_WHOLE)
def test_a_cache_that_is_not_whole_is_written_again(cache, kind):
    name, damage = NOT_WHOLE[kind]
    damage(cache / name)
    assert read_index(cache) is None
    dataset = cached_job.plan(cache.parent).build()
    for _ in range(2):
        assert serves(dataset)
    assert read_index(cache)["count"] == cached_job.COUNT


@pytest.mark.slow
def test_a_cut_while_it_is_read(cache):
    batches = iter(cached_job.plan(cache.parent).build())
    found = next(batches).numpy()[:, 0].tolist()
    with open(cache / ROWS, "rb+") as file:
        file.truncate(cached_job.ROW_BYTES * 200)
    assert found + cached_job.numbers(batches) == cached_job.EXPECTED


@pytest.mark.slow
def test_rows_of_another_cache_of_the_same_size(cache, tmp_path):
    plan = cached_job.plan(cache.parent)
    theirs = cached_job.plan(tmp_path / "other", first=1000)
    assert cached_job.numbers(theirs.build())[0] == 2000
    shutil.copy(tmp_path / "other" / theirs.to_dict()["cache_key"] / ROWS, cache / ROWS)
    assert read_index(cache) is not None  # nothing else tells
    assert serves(plan.build())


@pytest.mark.slow
def test_a_cache_that_is_removed_between_epochs(cache):
    dataset = cached_job.plan(cache.parent).build()
    assert serves(dataset)
    shutil.rmtree(cache.parent)
    assert serves(dataset)
    assert read_index(cache)["count"] == cached_job.COUNT


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    # Permissions do not bind the user root, so the operating system's answer is given here.
    made = Path.mkdir

    def refuse(path, *arguments, **options):
        if path == tmp_path / "caches":
            raise PermissionError(13, "Permission denied", str(path))
        made(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", refuse)
    dataset = cached_job.plan(tmp_path / "caches").build()
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert serves(dataset)
        assert serves(dataset)
    assert caplog.text.count("Cannot write the cache") == 1
    assert "Permission denied" in caplog.text
