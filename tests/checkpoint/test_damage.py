"""Damaged checkpoints: found by their checksums, passed over with a warning, and never read wrong."""

import copy
import json
import logging
import os
import random

import numpy as np
import pytest
import saved_trainings
from hypothesis import given, settings
from hypothesis import strategies as st

from tfopt import checkpoint
from tfopt.checkpoint.folder import manifest as manifests
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError
from tfopt.warn import forget_warnings

STEPS = saved_trainings.kept_after(saved_trainings.STEPS)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


def newest(folder):
    """The manifest's file of the newest checkpoint."""
    return find_manifests(folder)[0].path


def blob_of(folder, name, step=None):
    """The file that holds an array of a checkpoint."""
    found = next(each for each in find_manifests(folder) if step in (None, each.step))
    return folder / "blobs" / f"{found.manifest.arrays[name].blob}.safetensors"


def expect_found(folder, path, caplog, harmless=False):
    """Fails unless a damaged file is named, and what is read is right all the same.

    `harmless` allows that nothing is found, if all is as it was.
    """
    forget_warnings()
    caplog.clear()
    before = snapshot(folder)
    report = checkpoint.verify(folder)
    with caplog.at_level(logging.WARNING, "tfopt"):
        found = read_or_refuse(folder)
    if report.passed:
        assert harmless
    else:
        assert {problem.file for problem in report.problems} == {str(path)}
    if isinstance(found, str):
        assert "all damaged" in found
        assert path.parent.name == "blobs"  # all checkpoints share it
    else:
        assert saved_trainings.is_state(found, found.step)
        assert found.step == STEPS[0] or path.name in caplog.text
    assert snapshot(folder) == before


def read_or_refuse(folder):
    """The newest whole checkpoint, or why there is none."""
    try:
        return read(folder)
    except CheckpointError as error:
        return str(error)


def snapshot(folder):
    return {path: path.read_bytes() for path in files_of(folder)}


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


FLIPS = [3, pytest.param(40, marks=pytest.mark.slow), pytest.param(400, marks=pytest.mark.campaign)]


@pytest.mark.parametrize("count", FLIPS)
def test_a_flipped_bit_in_each_file(trained, caplog, count):
    found_files = files_of(trained)
    assert len(found_files) > 10
    for path in found_files:
        whole = path.read_bytes()
        draw = random.Random(path.name.partition("-")[0] if path.suffix == ".json" else len(whole))
        for position in draw.sample(range(len(whole)), min(count, len(whole))):
            flip(path, position)
            # In a manifest: where a space becomes another one. In a blob: in what no checkpoint needs any more.
            expect_found(trained, path, caplog, harmless=True)
            path.write_bytes(whole)


@pytest.mark.parametrize("name", ["head/kernel", "head/bias", "frozen/kernel", "iterations"])
def test_a_flipped_bit_in_an_array(trained, caplog, name):
    path = blob_of(trained, name)
    place = find_manifests(trained)[0].manifest.arrays[name]
    flip(path, place.offset + place.content.size_bytes - 1)
    expect_found(trained, path, caplog)
    assert f"the array '{name}' does not match its checksum" in str(checkpoint.verify(trained))


def test_a_flipped_bit_in_a_header(trained, caplog):
    path = blob_of(trained, "head/kernel")
    for position in (0, 20, 100):
        flip(path, position)
        expect_found(trained, path, caplog)
        flip(path, position)
    assert checkpoint.verify(trained).passed


@pytest.mark.parametrize("change", ["missing", "empty", "cut", "longer"])
def test_files_of_other_sizes(trained, caplog, change):
    found_files = files_of(trained)
    assert {path.suffix for path in found_files} == {".json", ".safetensors"}
    for path in found_files:
        whole = path.read_bytes()
        if change == "missing" and path.suffix == ".json":
            continue  # the checkpoint is then not there at all
        path.unlink()
        if change != "missing":
            path.write_bytes({"empty": b"", "cut": whole[:-2], "longer": whole + b"\0"}[change])
        expect_found(trained, path, caplog)
        path.write_bytes(whole)


def test_files_that_changed_places(tmp_path, caplog):
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.write(step, {"value": np.full(100, step)})
    one, other = (blob_of(tmp_path, "value", step) for step in (1, 2))
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])
    with pytest.raises(CheckpointError, match="Found 2, all damaged; the newest: altered"):
        read(tmp_path)
    one.write_bytes(data[0])
    other.write_bytes(data[1])
    first, second = (each.path for each in reversed(find_manifests(tmp_path)))
    second.write_bytes(first.read_bytes())
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert read(tmp_path).arrays["value"][0] == 1
    assert "it is the manifest of checkpoint 1, step 1" in caplog.text


def test_the_last_whole_one_is_taken_and_the_damaged_one_named(trained, caplog):
    path = blob_of(trained, "head/kernel")
    flip(path, -1)
    with caplog.at_level(logging.WARNING, "tfopt"):
        found = read(trained)
        read(trained)
    assert saved_trainings.is_state(found, STEPS[1])
    assert found.passed_over == (newest(trained),)
    assert len(caplog.records) == 1
    assert str(newest(trained)) in caplog.text
    assert str(path) in caplog.text
    with pytest.raises(CheckpointError, match="Found 1, all damaged"):
        read(trained, STEPS[0])
    report = str(checkpoint.verify(trained))
    assert report.startswith("3 checkpoints: ")
    assert f"(step {STEPS[0]})" in report
    assert checkpoint.verify(trained, STEPS[1]).passed
    assert not checkpoint.verify(trained, STEPS[0]).passed


def test_all_damaged_is_an_error_and_no_new_training(trained):
    for each in find_manifests(trained):
        flip(each.path, 40)
    with pytest.raises(CheckpointError, match=r"Found 3, all damaged; the newest: altered: .*step-6\.json: its"):
        read(trained)


def test_a_training_that_goes_on_after_damage(trained):
    flip(blob_of(trained, "head/kernel"), -1)
    damaged = newest(trained)
    with saved_trainings.small_blobs(), Store(trained, keep=2, best=saved_trainings.BEST) as store:
        assert store.read().step == STEPS[1]
        assert damaged.exists()
        kept = []
        for step in (6, 7, 8):
            store.write(step, saved_trainings.arrays_at(step), saved_trainings.metadata_at(step))
            assert saved_trainings.is_state(store.read(), step)
            kept.append([each.step for each in find_manifests(trained)])
    assert kept[0] == [6, 6, 5, 3]  # the damaged one does not count among those to keep
    assert kept[1] == [7, 6]
    assert not damaged.exists()
    assert checkpoint.verify(trained).passed
    saved_trainings.expect_no_leftovers(trained)


def test_a_cut_file_does_not_count_among_those_to_keep(trained):
    with open(blob_of(trained, "head/kernel"), "r+b") as file:
        file.truncate(100)
    with saved_trainings.small_blobs(), Store(trained, keep=2) as store:
        store.write(7, saved_trainings.arrays_at(7))
    assert [each.step for each in find_manifests(trained)] == [7, 6, 5]


@pytest.mark.parametrize("change", ["flip", "cut", "missing"])
@pytest.mark.parametrize("same_store", [False, True])
def test_a_damaged_file_is_not_built_upon(trained, change, same_store):
    path = blob_of(trained, "frozen/kernel")
    arrays = saved_trainings.arrays_at(6)

    def damage():
        if change == "missing":
            path.unlink()
        else:
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data[:-1] if change == "cut" else data[:-1] + bytes([data[-1] ^ 1]))

    if not same_store:
        damage()
    with saved_trainings.small_blobs(), Store(trained, keep=2) as store:
        if same_store:
            store.read()
            damage()
        assert store.write(7, arrays | {"new": np.ones(3)}) > len(arrays["frozen/kernel"].tobytes())
        assert saved_trainings.same(store.read().arrays["frozen/kernel"], arrays["frozen/kernel"])
        assert store.read().step == 7


def test_a_manifest_that_cannot_be_read_now_loses_nothing(trained, monkeypatch):
    path = newest(trained)
    read_bytes = type(path).read_bytes

    def fail(self):
        if self == path:
            raise OSError(5, "Input/output error", str(self))
        return read_bytes(self)

    with monkeypatch.context() as patched, saved_trainings.small_blobs():
        patched.setattr(type(path), "read_bytes", fail)
        assert read(trained).step == STEPS[1]
        assert f"unreadable: {path}" in str(checkpoint.verify(trained))
        with Store(trained, keep=1) as store:
            for step in (7, 8):
                store.write(step, saved_trainings.arrays_at(step), saved_trainings.metadata_at(step))
    assert saved_trainings.is_state(read(trained, STEPS[0]), STEPS[0])
    Store(trained).close()
    saved_trainings.expect_no_leftovers(trained)


def test_a_manifest_of_another_version_is_left_alone(trained):
    path = newest(trained)
    body = json.loads(path.read_text())
    del body["sha256"]
    body = {name: body[name] for name in body if name in ("number", "step")} | {"format": 2, "elsewhere": [1]}
    path.write_text(json.dumps(body | {"sha256": manifests._checksum(body)}))
    with pytest.raises(CheckpointError, match="Found format 2, of another version of tfopt"):
        read(trained)
    assert "another version" in str(checkpoint.verify(trained))
    before = {*files_of(trained)}
    with Store(trained, keep=1) as store:
        for step in (7, 8):
            store.write(step, {"value": np.full(1000, step)})
    assert path.exists()
    assert {each for each in before if each.parent.name == "blobs"} <= {*files_of(trained)}


def test_a_file_that_may_not_be_read_is_an_error_and_not_damage(trained, monkeypatch):
    """With an older checkpoint, steps would be lost for a wrong permission."""
    from tfopt.checkpoint.folder import blobs

    monkeypatch.setattr(blobs, "open", lambda *_, **__: os.open("/none", os.O_RDONLY), raising=False)
    assert "missing" in str(checkpoint.verify(trained))

    def refuse(*arguments, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(blobs, "open", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied.*Make the files readable"):
        read(trained)
    assert "unreadable" in str(checkpoint.verify(trained))


@pytest.mark.parametrize("readable", [0, 1])
def test_a_folder_that_may_not_be_read_is_an_error(trained, monkeypatch, readable):
    """Also one that may be read at first, and not when `read` lists the steps that it has."""
    answers = [os.listdir(trained)] * readable

    def refuse(folder):
        if answers:
            return answers.pop()
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(CheckpointError, match=r"Permission denied.*Make the folder readable"):
        read(trained, 99)


def test_a_disk_that_cannot_be_read_is_damage(trained, monkeypatch, caplog):
    from tfopt.checkpoint.folder import blobs

    bad = blob_of(trained, "head/kernel")

    def fail(path, *arguments, **options):
        if path == bad:
            raise OSError(5, "Input/output error")
        return open(path, *arguments, **options)

    monkeypatch.setattr(blobs, "open", fail, raising=False)
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert read(trained).step == STEPS[1]
    assert str(bad) in caplog.text


def paths_into(value, path=()):
    """The place of each value in nested JSON."""
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths_into(value[key], (*path, key))


def changed(body, path, value):
    """A copy with another value, or without it."""
    body = copy.deepcopy(body)
    holder = body
    for key in path[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return body


@pytest.mark.slow
@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("with_checksum", [False, True])
def test_manifests_of_which_a_field_is_changed(tmp_path_factory, examples, with_checksum):
    """Without its checksum, each is damaged. With it, as by a forger, it is refused or gives what its hashes say."""
    folder = tmp_path_factory.mktemp("saved") / "fuzzed"
    saved_trainings.train(folder)
    older, path = STEPS[1], newest(folder)
    whole = json.loads(path.read_text())
    del whole["sha256"]
    checksum = manifests._checksum(whole)
    places = [place for place in paths_into(whole) if place]
    arrays = saved_trainings.arrays_at(STEPS[0])
    digests = {field["sha256"]: arrays[name] for name, field in whole["arrays"].items()}

    @settings(max_examples=examples, database=None)
    @given(st.sampled_from(places), JSON | st.just(...))
    def check(place, value):
        forget_warnings()
        body = changed(whole, place, value)
        unchanged = manifests._checksum(body) == checksum
        path.write_text(json.dumps(body | {"sha256": manifests._checksum(body) if with_checksum else checksum}))
        found = read_or_refuse(folder)
        if isinstance(found, str):
            assert with_checksum
            assert "another version" in found
            return
        if not with_checksum:
            assert found.step == (STEPS[0] if unchanged else older)
        for name, array in found.arrays.items():
            if found.step == older:
                assert saved_trainings.same(array, saved_trainings.arrays_at(older)[name])
            else:  # a forged dtype or shape shows the same bytes
                assert array.tobytes() == np.asarray(digests[found.manifest.arrays[name].content.sha256]).tobytes()
        checkpoint.available(folder)
        str(checkpoint.verify(folder))

    check()


@given(text=st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()) | st.just(b"[" * 100_000))
@settings(max_examples=60)
def test_manifests_that_are_something_else(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("saved")
    path = folder / "00000001-step-1.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match="Found 1, all damaged"):
        read(folder)
    assert checkpoint.available(folder) == ()
    assert len(checkpoint.verify(folder).problems) == 1
