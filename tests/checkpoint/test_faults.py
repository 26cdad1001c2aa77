"""Disks that are full, broken, read-only or gone: typed errors, and no checkpoint is lost."""

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import saved_trainings
from shimmed_disk import AFTER, AMID, shimmed

from tfopt import checkpoint
from tfopt.checkpoint.folder import locking
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError

ROOT = Path(__file__).parents[2]
ERRORS = ("EIO", "ENOSPC", "EDQUOT", "EROFS")


def shares(value):
    return [
        pytest.param(value, 40, 1),
        pytest.param(value, 10, 3, marks=pytest.mark.slow),
        pytest.param(value, 1, 0, marks=pytest.mark.campaign),
    ]


@pytest.mark.parametrize(("name", "every", "first"), [share for name in ERRORS for share in shares(name)])
@pytest.mark.parametrize("lasting", [False, True])
def test_an_error_of_each_call_that_changes_the_disk(tmp_path, name, every, first, lasting):
    total = failing_calls(tmp_path / "whole", None, name, lasting)[0]
    assert total > 200
    for number in range(first, total, every):
        folder = tmp_path / str(number)
        _, saved, refused = failing_calls(folder, number, name, lasting)
        # Nothing is refused where only the removal of old checkpoints fails, which is a warning.
        assert os.strerror(getattr(errno, name)) in refused if refused else saved == saved_trainings.STEPS
        expect_nothing_lost_in(folder, saved)
        left = range(saved + 1, saved_trainings.STEPS + 1)
        saved_trainings.train(folder, left)
        saved_trainings.expect_nothing_lost(folder, saved_trainings.STEPS)
        saved_trainings.expect_no_leftovers(folder)
        shutil.rmtree(folder)


def failing_calls(folder, number, name, lasting):
    """Trains on a disk of which a call fails, and, if `lasting`, all later ones.

    Returns how many calls there are, the last step that was saved, and the error of the next one.
    """
    calls, saved, refused = [0], 0, ""

    def on(call, moment, path, arguments):
        at = calls[0]
        calls[0] += 1
        # Every call fails before it does anything, half-way, or after it was done, as far as anyone can tell.
        if number is not None and (at == number or (lasting and at > number and moment != AMID)):
            raise OSError(getattr(errno, name), os.strerror(getattr(errno, name)), path)

    with shimmed(folder, on), saved_trainings.small_blobs():
        store = None
        for step in range(1, saved_trainings.STEPS + 1):
            try:
                store = store or Store(folder, keep=saved_trainings.KEEP, best=saved_trainings.BEST)
                store.write(step, saved_trainings.arrays_at(step), saved_trainings.metadata_at(step))
            except CheckpointError as error:
                refused = str(error)
                break
            saved = step
        if store is not None:
            store.close()
    return calls[0], saved, refused


def expect_nothing_lost_in(folder, saved):
    if not saved and not folder.exists():
        return
    saved_trainings.expect_nothing_lost(folder, saved)


def test_the_next_save_succeeds_after_an_error(tmp_path):
    broken = []

    def on(call, moment, path, arguments):
        if broken and moment == AFTER and call == broken[0]:
            raise OSError(errno.EIO, "Input/output error", path)

    with shimmed(tmp_path, on), saved_trainings.small_blobs(), Store(tmp_path, keep=3) as store:
        for step, call in enumerate(("open", "write", "fsync", "replace"), start=1):
            store.write(2 * step, saved_trainings.arrays_at(2 * step), saved_trainings.metadata_at(2 * step))
            before = [each.step for each in find_manifests(tmp_path)]
            broken.append(call)
            with pytest.raises(CheckpointError, match=r"to save step .* Found: .*Input/output error.*Earlier"):
                store.write(2 * step + 1, saved_trainings.arrays_at(2 * step + 1))
            broken.clear()
            assert [each.step for each in find_manifests(tmp_path)] == before
            saved_trainings.expect_no_leftovers(tmp_path)
    assert checkpoint.verify(tmp_path).passed


def test_old_checkpoints_that_cannot_be_removed_are_a_warning(tmp_path, caplog):
    def on(call, moment, path, arguments):
        if call == "unlink":
            raise OSError(errno.EIO, "Input/output error", path)

    with shimmed(tmp_path, on), Store(tmp_path, keep=1) as store:
        for step in (1, 2, 3):
            store.write(step, {"step": np.int64(step)})
    assert [each.step for each in find_manifests(tmp_path)] == [3, 2, 1]
    assert caplog.text.count("Expected to remove old checkpoints") == 1
    with Store(tmp_path, keep=1) as store:
        store.write(4, {"step": np.int64(4)})
    assert [each.step for each in find_manifests(tmp_path)] == [4]


@pytest.mark.parametrize("kind", [".safetensors", "-step-"])
def test_a_disk_that_stores_something_else(trained, kind):
    """Old checkpoints are removed only when the new one was read back."""

    def on(call, moment, path, arguments):
        if call == "fsync" and moment == AFTER and kind in path:
            with open(path, "r+b") as file:
                file.seek(-2, 2)
                file.write(b"\xff")

    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file() and path.name != "lock"}
    with Store(trained, keep=1) as store, shimmed(trained, on):
        with pytest.raises(CheckpointError, match="Expected to read back"):
            store.write(7, saved_trainings.arrays_at(7))
        assert store.read().step == saved_trainings.STEPS
    found = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file() and path.name != "lock"}
    assert found == before


def test_an_array_that_changes_while_it_is_saved(trained):
    class Changing(dict):
        def __getitem__(self, name):
            return np.random.default_rng().random(100)

    with Store(trained) as store:
        with pytest.raises(CheckpointError, match="changed while it was being saved"):
            store.write(7, Changing(value=None))
        assert store.read().step == saved_trainings.STEPS
    saved_trainings.expect_no_leftovers(trained)


def test_an_interrupt_leaves_nothing(trained):
    class Interrupting(dict):
        def __getitem__(self, name):
            if name == "last" and not self.pop("last"):
                raise KeyboardInterrupt
            return np.ones(1000)

    with saved_trainings.small_blobs(), Store(trained) as store:
        arrays = Interrupting(first=None, last=False)
        with pytest.raises(KeyboardInterrupt):
            store.write(7, arrays)
        assert store.read().step == saved_trainings.STEPS
    saved_trainings.expect_no_leftovers(trained)


def test_a_limit_on_files(trained):
    """It is reported as a full disk is, and half-way through a write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Store(trained) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        try:
            with pytest.raises(CheckpointError, match="File too large"):
                store.write(7, {"large": np.ones(100_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        saved_trainings.expect_no_leftovers(trained)
        store.write(7, {"large": np.ones(100_000)})
        assert store.read().arrays["large"][-1] == 1


FULL_DISK = """
import subprocess, sys
import numpy as np
from pathlib import Path
from tfopt import checkpoint
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=True)
said = []

def attempt(act):
    try:
        said.append(f"{act()}")
    except CheckpointError as error:
        said.append(str(error))

store = Store(disk / "saved", keep=2)
rows = np.random.default_rng(0)
for step in range(4):  # 300 KB each: three of them fit, and there are never more
    store.write(step, {"value": rows.random(37_000)})
attempt(lambda: store.write(4, {"value": rows.random(80_000)}))
attempt(lambda: [each.step for each in checkpoint.available(disk / "saved")])
attempt(lambda: store.write(5, {"value": rows.random(37_000)}) > 290_000)
store.close()
subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
attempt(lambda: Store(disk / "saved"))
attempt(lambda: [each.step for each in checkpoint.available(disk / "saved")])
attempt(lambda: checkpoint.verify(disk / "saved"))
print("\\n".join(said))
"""


def test_a_full_disk_and_a_read_only_one(tmp_path):
    try:
        subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", tmp_path], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("only root may mount a disk, and not in every container")
    command = ["unshare", "-m", sys.executable, "-c", FULL_DISK, str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr
    full, kept, saved, read_only, still_kept, report = output.stdout.splitlines()
    assert "No space left on device" in full
    assert kept == "[3, 2]"
    assert saved == "True"
    assert "Read-only file system" in read_only
    assert still_kept == "[5, 3]"
    assert report == "2 checkpoints: every checksum matches"


@pytest.mark.parametrize("what", ["folder", "blobs", "lock", "replaced", "another training's"])
def test_a_folder_that_vanishes(trained, what):
    store = Store(trained)
    arrays = saved_trainings.arrays_at(7)
    store.write(7, arrays)
    if what in ("blobs", "lock"):
        gone = trained / what
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    else:
        shutil.rmtree(trained)
    other = None
    if what == "replaced":
        (trained / "blobs").mkdir(parents=True)
        (trained / "lock").touch()
    if what == "another training's":
        other = Store(trained)
        being_written = trained / "blobs" / f".{'0' * 64}.safetensors.01234567"
        being_written.touch()
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"to save step 8 .* Check that the folder exists"):
            store.write(8, arrays)
        assert not list(trained.glob("*-step-8.json"))
    store.close()
    if other is not None:
        assert being_written.exists()
        other.close()
    with Store(trained) as store:
        store.write(8, arrays)
        assert store.read().step == 8


@pytest.mark.parametrize(("name", "refused"), [("EINVAL", False), ("EACCES", False), ("EIO", True)])
def test_a_folder_above_that_cannot_be_synced(tmp_path, monkeypatch, name, refused):
    """Folders that automount others cannot, and some may not be read; neither is made by a training."""

    def fail(path):
        if path == tmp_path:
            raise OSError(getattr(errno, name), name)

    monkeypatch.setattr(locking, "sync", fail)
    if refused:
        with pytest.raises(CheckpointError, match="EIO"):
            Store(tmp_path / "saved")
        monkeypatch.undo()
    Store(tmp_path / "saved").close()


def test_the_error_says_what_to_do(tmp_path):
    store = Store(tmp_path / "saved")
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(CheckpointError) as caught:
        store.write(8, {})
    assert str(tmp_path / "saved") in str(caught.value)
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    store.close()


def test_readers_while_a_training_saves_and_removes(tmp_path):
    """A reader finds a whole checkpoint at any moment, and nothing damaged."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
import saved_trainings
for number in range(int(sys.argv[1])):
    saved_trainings.train({str(tmp_path / "saved")!r}, range(1 + 6 * number, 7 + 6 * number))
"""
    saved_trainings.train(tmp_path / "saved", range(1, 3))
    with subprocess.Popen([sys.executable, "-c", code, "8"], cwd=ROOT) as training:
        newest = 0
        while training.poll() is None:
            found = read(tmp_path / "saved")
            assert not found.passed_over
            with contextlib.suppress(CheckpointError):  # removed meanwhile, as an old one
                assert saved_trainings.is_state(found, found.step)
            report = checkpoint.verify(tmp_path / "saved")
            assert report.passed, str(report)
            newest = found.step
        assert training.returncode == 0
    assert newest > 2
    assert json.loads(next((tmp_path / "saved").glob("*-step-48.json")).read_text())["step"] == 48
