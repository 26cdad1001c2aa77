"""A training whose state at each step is known, as a store of checkpoints sees it; and what must be in its folder."""

import contextlib
from unittest import mock

import ml_dtypes
import numpy as np

from tfopt import checkpoint
from tfopt.checkpoint.folder import packing
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.reading import read
from tfopt.checkpoint.folder.store import Store

BEST = ("val_loss", "min")
KEEP = 2
STEPS = 6


def arrays_at(step, scale=1):
    """Weights of which some never change, some change at every third step, and some at each."""

    def drawn(seed, *shape):
        return np.random.default_rng(seed).standard_normal(shape).astype("float32")

    return {
        "frozen/kernel": drawn(1, 30 * scale, 20),
        "frozen/bias": drawn(2, 20),
        "slow/kernel": drawn(1000 + step // 3, 25, 20 * scale),
        "head/kernel": drawn(2000 + step, 20, 10 * scale),
        "head/bias": drawn(3000 + step, 10).astype(ml_dtypes.bfloat16),
        "head/scale": drawn(4000 + step, 7).astype(ml_dtypes.float8_e4m3fn),
        "alternating": drawn(step % 2, 600),  # alone in a blob, which an older checkpoint has as well
        "twin": drawn(2, 20),
        "iterations": np.int64(step),
        "empty": np.zeros((0, 3)),
        "mask": np.arange(5) % 2 == 0,
    }


def metadata_at(step):
    return {"epoch": step // 2, "metrics": {"val_loss": (step * 5 % 7) / 8}, "name": "ä\n"}


@contextlib.contextmanager
def small_blobs(size_bytes=2100):
    """Several blobs for a small state."""
    with mock.patch.object(packing, "BLOB_BYTES", size_bytes):
        yield


def train(folder, steps=range(1, STEPS + 1), saved=lambda step: None, scale=1):
    """Saves each step; calls `saved` when that is done."""
    with small_blobs(), Store(folder, keep=KEEP, best=BEST) as store:
        for step in steps:
            store.write(step, arrays_at(step, scale), metadata_at(step))
            saved(step)


def is_state(found, step, scale=1):
    """Whether a checkpoint holds exactly the state at a step."""
    expected = arrays_at(step, scale)
    return (
        found.step == step
        and found.metadata == metadata_at(step)
        and list(found.arrays) == list(expected)
        and all(same(found.arrays[name], array) for name, array in expected.items())
    )


def same(found, expected):
    expected = np.asarray(expected)
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def kept_after(step):
    """The steps in the folder after one was saved, the newest first."""
    best = min(range(1, step + 1), key=lambda each: (metadata_at(each)["metrics"]["val_loss"], each))
    return sorted({*range(max(1, step - KEEP + 1), step + 1), best}, reverse=True)


def expect_nothing_lost(folder, saved, scale=1):
    """Fails unless the folder has the last saved step or the one after it, and every checkpoint is whole.

    `saved` is the last step whose `write` has returned, 0 for none. Returns the newest step.
    """
    found = read(folder)
    newest = found.step if found else 0
    assert newest in (saved, saved + 1), (newest, saved)
    manifests = find_manifests(folder)
    steps = [each.step for each in manifests]
    assert {*kept_after(newest)} <= {*steps} if newest else not steps, (steps, newest)
    if manifests:
        report = checkpoint.verify(folder)
        assert report.passed, str(report)
    for step in steps:
        assert is_state(read(folder, step), step, scale), step
    return newest


def expect_no_leftovers(folder):
    """Fails if the folder holds anything but the lock, the manifests and their blobs."""
    manifests = find_manifests(folder)
    names = {each.path.name for each in manifests} | {"lock", "blobs"}
    assert {path.name for path in folder.iterdir()} == names
    needed = {f"{blob}.safetensors" for each in manifests for blob in each.manifest.blobs}
    assert {path.name for path in (folder / "blobs").iterdir()} == needed


def plain(path):
    """The kind of file that a path names: "#" for a blob, "step" for a manifest."""
    name = path.rpartition("/")[2]
    return "#" if ".safetensors" in name else "step" if "-step-" in name else name
