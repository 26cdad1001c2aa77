import datetime
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import saved_trainings
from saved_trainings import same

from tfopt import checkpoint
from tfopt.checkpoint.folder.blobs import BLOB_BYTES
from tfopt.checkpoint.folder.contents import DTYPES
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError

ROOT = Path(__file__).parents[2]
MIB = 2**20


def blob_names(folder):
    return {path.name for path in (folder / "blobs").iterdir()}


def steps(folder):
    return [each.step for each in find_manifests(folder)]


def drawn(seed, size_bytes):
    return np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_comes_back_bit_for_bit(tmp_path, name):
    dtype = DTYPES[name]
    plain = np.arange(24).astype(dtype) if dtype.kind == "b" else drawn(1, 24 * dtype.itemsize).view(dtype)
    if name in ("int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn"):
        plain = np.arange(24).astype(dtype)
    arrays = {"plain": plain, "scalar": plain[3], "shaped": plain.reshape(2, 3, 4), "empty": plain[:0].reshape(0, 7)}
    arrays |= {"turned": plain.reshape(4, 6).T, "every second": plain[::2], "zero-dimensional": plain[5:6].reshape(())}
    with Store(tmp_path) as store:
        store.write(1, arrays)
        found = store.read().arrays
        assert found.keys() == arrays.keys()
        for each, array in arrays.items():
            assert same(found[each], np.asarray(array, order="C")), each


def test_other_byte_orders_are_converted(tmp_path):
    with Store(tmp_path) as store:
        store.write(1, {"big": np.arange(5, dtype=">f4")})
        assert same(store.read().arrays["big"], np.arange(5, dtype="float32"))


@pytest.mark.parametrize(
    "value",
    [
        np.array(["text"]),
        np.array([b"bytes"]),
        np.array([object()]),
        np.array(["2020-01-01"], "datetime64[s]"),
        np.zeros(2, [("x", "f4")]),
        np.zeros(2, "longdouble"),
        np.ma.array([1, 2], mask=[0, 1]),
        [1.0],
        1.0,
        None,
    ],
)
def test_what_is_no_array_of_numbers_is_refused(tmp_path, value):
    with Store(tmp_path) as store:
        with pytest.raises(TypeError, match=r"Expected .*array.* Received for 'odd'"):
            store.write(1, {"fine": np.ones(3), "odd": value})
        assert not steps(tmp_path)
        assert not blob_names(tmp_path)


@pytest.mark.parametrize("metadata", [{"loss": np.float32(1)}, {1: 2}, {"a": [{None: 1}]}, {"a": {1, 2}}, {"a": b""}])
def test_metadata_that_is_not_json_is_refused(tmp_path, metadata):
    with Store(tmp_path) as store, pytest.raises(TypeError, match="Expected JSON values as metadata"):
        store.write(1, {}, metadata)


def test_metadata_comes_back(tmp_path):
    metadata = {"epoch": 3, "history": {"loss": [0.1, 1e-300, float("inf")]}, "text": "ä\ud800\n", "none": None}
    with Store(tmp_path) as store:
        store.write(1, {}, metadata | {"pair": (1, 2), "nan": float("nan")})
        found = dict(store.read().metadata)
        assert np.isnan(found.pop("nan"))
        assert found == metadata | {"pair": [1, 2]}


def test_arguments(tmp_path):
    with Store(tmp_path) as store:
        with pytest.raises(ValueError, match="__metadata__"):
            store.write(1, {"__metadata__": np.ones(1)})
        with pytest.raises(ValueError, match="Expected step to be at least 0"):
            store.write(-1, {})
        with pytest.raises(TypeError, match="Expected step to be an integer"):
            store.write(1.0, {})
    with pytest.raises(ValueError, match="Expected keep to be at least 1"):
        Store(tmp_path, keep=0)
    for best in ("val_loss", ("val_loss",), ("val_loss", 1), 3):
        with pytest.raises(TypeError, match="Expected best"):
            Store(tmp_path, best=best)
    with pytest.raises(ValueError, match="Expected 'min' or 'max'"):
        Store(tmp_path, best=("val_loss", "low"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="which is a file"):
        Store(tmp_path / "file")
    with pytest.raises(CheckpointError, match="Not a directory"):
        Store(tmp_path / "file" / "below")
    Store(tmp_path).close()  # none of them has kept the lock


def test_arrays_are_mapped_and_cannot_be_written(tmp_path):
    arrays = {"large": drawn(1, MIB).view("float32"), "small": drawn(2, 100)}
    with Store(tmp_path) as store:
        store.write(1, arrays)
        found = store.read().arrays
    large = found["large"]
    assert isinstance(large.base, np.memmap)
    assert type(large) is np.ndarray
    assert large.flags.aligned
    for array in (large, found["small"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    for name, path in [(each, next((tmp_path / "blobs").iterdir())) for each in arrays]:
        path.unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match="Read the checkpoint again"):
            found[name]
    assert same(large, arrays["large"])  # what is mapped outlives its file's name


def test_arrays_are_read_by_several_threads(tmp_path):
    arrays = {str(number): drawn(number, 100_000) for number in range(40)}
    with saved_trainings.small_blobs(300_000), Store(tmp_path) as store:
        store.write(1, arrays)
        found = store.read().arrays
    with ThreadPoolExecutor(4) as threads:
        for name, array in zip(arrays, threads.map(found.__getitem__, arrays), strict=True):
            assert same(array, arrays[name])


def test_what_did_not_change_is_not_written_again(tmp_path):
    arrays = {f"frozen/{number}": drawn(number, 90_000) for number in range(10)} | {"head": drawn(99, 100_000)}
    with saved_trainings.small_blobs(200_000), Store(tmp_path, keep=2) as store:
        full = store.write(1, arrays)
        assert full > 1_000_000
        before = blob_names(tmp_path)
        assert store.write(2, arrays) == 0
        assert blob_names(tmp_path) == before
        for step in range(3, 8):
            arrays["head"] = drawn(100 + step, 100_000)
            assert store.write(step, arrays) <= 0.15 * full
        assert same(store.read().arrays["head"], arrays["head"])
    with saved_trainings.small_blobs(200_000), Store(tmp_path, keep=2) as store:  # another process
        assert store.write(8, arrays) == 0
        arrays["frozen/3"] = drawn(7, 90_000)  # it is equal to another one
        assert store.write(9, arrays) == 0
        assert same(store.read().arrays["frozen/3"], drawn(7, 90_000))


def test_arrays_that_change_come_apart_from_those_that_do_not(tmp_path):
    """Else what does not change would be written again with each blob that it shares."""
    arrays = {f"{kind}/{number}": drawn(number, 1000) for number in range(20) for kind in ("frozen", "trained")}
    del arrays["frozen/0"]  # less than half of the blob stays
    with Store(tmp_path) as store:
        written = []
        for step in range(4):
            arrays |= {f"trained/{number}": drawn(1000 * (step + 1) + number, 1000) for number in range(20)}
            written.append(store.write(step, arrays))
    assert written[0] > 39_000
    assert written[1] > 39_000  # the blob of step 0 is left behind
    assert max(written[2:]) < 25_000


@pytest.mark.parametrize("seed", range(4))
def test_a_history_at_random(tmp_path, seed):
    draw = np.random.default_rng(seed)
    arrays = {str(number): drawn(number, int(draw.integers(0, 3000))) for number in range(30)}
    states = {}
    store = Store(tmp_path, keep=3)
    for step in range(40):
        for name in arrays:
            if draw.random() < int(name) / 60:
                arrays[name] = drawn(int(draw.integers(50)), len(arrays[name]))
        states[step] = dict(arrays)
        with saved_trainings.small_blobs(8000):
            store.write(step, arrays)
        if draw.random() < 0.2:
            store.close()
            store = Store(tmp_path, keep=3)
        if draw.random() < 0.3:
            arrays = dict(states[step := draw.choice(steps(tmp_path))])
            found = store.read(int(step))
            assert all(same(found.arrays[name], arrays[name]) for name in arrays)
    store.close()
    for found in find_manifests(tmp_path):
        held = read(tmp_path, found.step).arrays
        assert all(same(held[name], array) for name, array in states[found.step].items())
        data_bytes = sum(size.data_bytes for size in found.manifest.blobs.values())
        assert data_bytes <= 2 * found.manifest.size_bytes
    saved_trainings.expect_no_leftovers(tmp_path)


def test_small_arrays_share_a_file_and_large_ones_have_their_own(tmp_path):
    arrays = {str(number): drawn(number, 100) for number in range(500)} | {"large": drawn(501, BLOB_BYTES + 1)}
    with Store(tmp_path) as store:
        store.write(1, arrays)
    assert len(blob_names(tmp_path)) == 2


def test_other_programs_can_read_the_arrays(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    arrays = saved_trainings.arrays_at(1)
    with Store(tmp_path) as store:
        store.write(1, arrays)
    (path,) = (tmp_path / "blobs").iterdir()
    with safetensors.safe_open(path, "numpy") as file:
        assert {*file.keys()} == {*arrays} - {"twin"}
        assert same(file.get_tensor("frozen/kernel"), arrays["frozen/kernel"])
        assert same(file.get_tensor("head/bias"), arrays["head/bias"])
        assert file.get_slice("head/scale").get_dtype() == "F8_E4M3"


def test_the_newest_ones_and_the_best_are_kept(tmp_path):
    saved = []
    saved_trainings.train(tmp_path, saved=lambda step: saved.append((step, steps(tmp_path))))
    assert saved == [(step, saved_trainings.kept_after(step)) for step in range(1, saved_trainings.STEPS + 1)]
    assert saved[-1][1] == [6, 5, 3]
    saved_trainings.expect_no_leftovers(tmp_path)


@pytest.mark.parametrize(
    ("which", "values", "best"),
    [
        ("min", [2, 1, 3, 4, 5], 1),
        ("max", [2, 5, 3, 4, 1], 1),
        ("min", [2, 1, 1, 3, 3], 1),  # the earliest of equal ones
        ("max", [float("nan"), 1, 3, 2, float("nan")], 2),
        ("min", [float("nan")] * 5, None),
        ("min", [1, None, "text", [0], True], 0),
        ("min", [10**400, float("inf"), 2, 3, 4], 2),
    ],
)
def test_which_is_best(tmp_path, which, values, best):
    with Store(tmp_path, keep=1, best=("score", which)) as store:
        for step, value in enumerate(values):
            store.write(step, {"step": np.int64(step)}, {"metrics": {"score": value}})
    last = len(values) - 1
    assert steps(tmp_path) == ([last] if best is None else [last, best])
    assert [each.step for each in checkpoint.available(tmp_path) if each.best] == ([] if best is None else [best])


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    with Store(tmp_path, keep=2) as store:
        for value, step in enumerate([1, 2, 2, 2]):
            store.write(step, {"value": np.int64(value)})
        assert steps(tmp_path) == [2, 1]
        assert store.read(2).arrays["value"] == 3


def test_a_training_that_goes_back(tmp_path):
    with Store(tmp_path, keep=2) as store:
        for step in (100, 200, 300):
            store.write(step, {"step": np.int64(step)})
        assert store.read(200).arrays["step"] == 200
        store.write(250, {"step": np.int64(250)})
        assert store.read().step == 250
        assert steps(tmp_path) == [250, 300]
        store.write(260, {"step": np.int64(260)})
        assert steps(tmp_path) == [260, 250]


def test_a_clock_that_jumps(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", iter([2e9, 1e9, 1.5e9, 0.0, 5e8]).__next__)
    with Store(tmp_path, keep=2) as store:  # the lock's file has a time as well
        for step in range(1, 5):
            store.write(step, {"step": np.int64(step)})
            assert store.read().step == step
    assert steps(tmp_path) == [4, 3]
    times = [each.time for each in checkpoint.available(tmp_path)]
    assert times == [datetime.datetime.fromtimestamp(at, datetime.UTC) for at in (5e8, 0.0)]


def test_nothing_there(tmp_path):
    assert read(tmp_path / "none") is None
    assert not (tmp_path / "none").exists()
    with Store(tmp_path) as store:
        assert store.read() is None
        with pytest.raises(CheckpointError, match=r"step 3 in .* Found none"):
            store.read(3)
        store.write(7, {})
        store.write(8, {})
        with pytest.raises(CheckpointError, match=r"Found the steps 7, 8\. Pass one"):
            store.read(3)
        assert len(store.read().arrays) == 0


def test_a_second_training_is_refused(tmp_path):
    with Store(tmp_path) as store:
        leftover = tmp_path / "blobs" / f".{'0' * 64}.safetensors.01234567"  # the first one may be writing it
        leftover.touch()
        holder = f"Process {os.getpid()} on {socket.gethostname()}, "
        with pytest.raises(CheckpointError, match=f"only training .* {holder}"):
            Store(tmp_path)
        code = f"from tfopt.checkpoint.folder.store import Store; Store({str(tmp_path)!r})"
        other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
        assert holder in other.stderr
        assert leftover.exists()
        store.write(1, {})
    with pytest.raises(CheckpointError, match="Expected an open store"):
        store.write(2, {})
    with Store(tmp_path) as store:
        assert not leftover.exists()
        assert store.read().step == 1


def test_a_holder_that_is_killed_or_dropped(tmp_path):
    path = str(tmp_path)
    code = f"from tfopt.checkpoint.folder.store import Store; s = Store({path!r}); print(1, flush=True); input()"
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, **pipes) as holder:
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(CheckpointError, match=f"Process {holder.pid} on"):
            Store(tmp_path)
        holder.send_signal(signal.SIGKILL)
    store = Store(tmp_path)
    (tmp_path / "lock").write_text("{")
    with pytest.raises(CheckpointError, match="Another training saves there now"):
        Store(tmp_path)
    del store
    gc.collect()
    Store(tmp_path).close()


def test_leftovers_are_removed_by_the_next_training_only(trained):
    known = next((trained / "blobs").iterdir()).name
    leftovers = [
        trained / ".00000009-step-9.json.0123abcd",
        trained / "blobs" / f".{known}.0123abcd",
        trained / "blobs" / f"{'0' * 64}.safetensors",
    ]
    others = [trained / "notes.txt", trained / ".hidden", trained / "blobs" / "mine.safetensors", trained / "9.json"]
    for path in leftovers + others:
        path.write_bytes(b"{")
    read(trained)
    assert checkpoint.verify(trained).passed
    assert len(checkpoint.available(trained)) == 3
    assert all(path.exists() for path in leftovers + others)
    Store(trained).close()
    assert not any(path.exists() for path in leftovers)
    assert all(path.exists() for path in others)
    assert saved_trainings.is_state(read(trained), saved_trainings.STEPS)


def test_a_working_folder_that_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with Store("saved") as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        store.write(1, {"value": np.ones(3)})
        assert same(store.read().arrays["value"], np.ones(3))
    monkeypatch.chdir(tmp_path)
    found = read("saved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert same(found.arrays["value"], np.ones(3))


def test_arrays_are_asked_for_one_after_the_other(tmp_path):
    made_arrays, alive = [], []

    class Made(dict):
        def __getitem__(self, name):
            array = np.full(4000, int(name), np.uint8)
            made_arrays.append(weakref.ref(array))
            alive.append(sum(each() is not None for each in made_arrays))
            return array

    made = Made.fromkeys(map(str, range(20)))
    with saved_trainings.small_blobs(10_000), Store(tmp_path) as store:
        store.write(1, made)
        assert max(alive) <= 2
        assert store.read().arrays["17"][-1] == 17


def test_memory_is_bounded(tmp_path):
    arrays = {"large": np.ones(48 * MIB, np.uint8)} | {str(number): drawn(number, 2 * MIB) for number in range(20)}
    with Store(tmp_path) as store:
        tracemalloc.start()
        try:
            store.write(1, arrays)
            store.read()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 20 * MIB  # a buffer for each thread that checks


def test_closing_waits_for_a_write(tmp_path):
    entered, leave = threading.Event(), threading.Event()

    class Slow(dict):
        def __getitem__(self, name):
            entered.set()
            assert leave.wait(60)
            return np.ones(3)

    store = Store(tmp_path)
    with ThreadPoolExecutor(2) as threads:
        writing = threads.submit(store.write, 1, Slow(value=None))
        assert entered.wait(60)
        closing = threads.submit(store.close)
        time.sleep(0.05)
        assert not closing.done()
        leave.set()
        writing.result()
        closing.result()
    assert read(tmp_path).step == 1


def test_the_manifest_can_be_read_by_people(trained):
    (path, *_) = sorted(trained.glob("*-step-6.json"))
    lines = path.read_text().splitlines()
    assert ' "step": 6,' in lines
    assert any(line.startswith('  "head/bias": {"dtype": "bfloat16", "shape": [10]') for line in lines)
    assert json.loads(path.read_text())["metadata"]["metrics"] == {"val_loss": 2 / 8}


def test_nothing_loads_tensorflow(tmp_path):
    code = f"""
import sys, tfopt, numpy as np
from tfopt.checkpoint.folder.store import Store
with Store({str(tmp_path)!r}) as store:
    store.write(1, {{"a": np.ones(3)}})
print(tfopt.checkpoint.available({str(tmp_path)!r}), tfopt.checkpoint.verify({str(tmp_path)!r}))
print([name for name in ("tensorflow", "keras") if name in sys.modules])
"""
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert output.endswith("\n[]\n")
