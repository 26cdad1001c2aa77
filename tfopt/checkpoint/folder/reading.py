"""Reads a checkpoint: the newest whole one, after every byte of it was checked. Readers change and lock nothing."""

import datetime
import errno
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfopt import checks
from tfopt.checkpoint.folder.blobs import Place, map_array, path_of, problems_of
from tfopt.checkpoint.folder.manifest import Found, Manifest, find_manifests
from tfopt.errors import CheckpointError
from tfopt.hardware import host
from tfopt.pipelines.shared.problems import Problem
from tfopt.warn import warn_once

_TRIES = 10  # while the training removes old checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was found whole."""

    path: Path
    """Its manifest."""
    step: int
    time: datetime.datetime
    """When it was saved, in UTC."""
    metadata: dict[str, Any]
    """As passed to `Store.write`; tuples come back as lists."""
    arrays: Mapping[str, np.ndarray]
    """The arrays by name, read-only, loaded on access; safe to use from several threads. Keep few alive at once: each
    large one holds a file open. Raises CheckpointError if its file has been removed."""
    manifest: Manifest
    passed_over: tuple[Path, ...]
    """Manifests of newer checkpoints, which are damaged."""


class StoredArrays(Mapping[str, np.ndarray]):
    """The arrays of a checkpoint."""

    def __init__(self, folder: Path, places: Mapping[str, Place]):
        self._folder, self._places = folder, places

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        try:
            return map_array(self._folder, place)
        except (OSError, ValueError) as error:  # ValueError: the file is too short
            raise CheckpointError(
                f"Expected the array {name!r} in {os.fspath(path_of(self._folder, place.blob))!r}. Found: {error}. "
                "It was there when the checkpoint was read. Read the checkpoint again."
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read(folder: str | os.PathLike[str], step: int | None = None) -> Checkpoint | None:
    """Returns the newest checkpoint of a folder that is whole, or the one of a step.

    All of it is read once and compared with its checksums. Damaged checkpoints are passed over with a warning that
    names the damaged file.

    Args:
        folder: Where the training saves.
        step: Default: the step of the newest whole checkpoint.

    Returns:
        The checkpoint; None if the folder has none and no step was asked for.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `folder` is a file or `step` is negative.
        tfopt.errors.CheckpointError: If there is none of this step, all are damaged, or the folder cannot be read.

    Example:
        >>> read("checkpoints").arrays["model/dense/kernel"].shape
        (784, 128)
    """
    where, step = checked(folder, step)
    where = where.absolute()
    try:
        found, passed_over = _newest_whole(where, step)
    except OSError as error:
        raise CheckpointError(
            f"Expected to read the checkpoints in {os.fspath(where)!r}. Found: {error}. Make the files readable."
        ) from error
    if found is not None:
        return found
    if passed_over:
        raise CheckpointError(
            f"Expected a whole checkpoint in {os.fspath(where)!r}. Found {len(passed_over)}, all damaged; the "
            f"newest: {passed_over[0][1]}. Restore the files from a backup, or save to another folder."
        )
    if step is None:
        return None
    steps = ", ".join(str(each.step) for each in reversed(manifests_in(where)))
    raise CheckpointError(
        f"Expected a checkpoint of step {step} in {os.fspath(where)!r}. Found "
        + (f"the steps {steps}. Pass one of them." if steps else "none.")
    )


def checked(folder: str | os.PathLike[str], step: int | None) -> tuple[Path, int | None]:
    """Returns the arguments of `read`; raises TypeError or ValueError for wrong ones."""
    where = checks.folder("folder", folder, "Pass the folder that the training saves to.")
    if step is not None:
        step = checks.integer("step", step, "Pass the step of a checkpoint.", least=0)
    return where, step


def manifests_in(folder: Path) -> list[Found]:
    """Reads the manifests in a folder, the newest first; raises CheckpointError if it cannot be read."""
    try:
        return find_manifests(folder)
    except OSError as error:
        raise CheckpointError(
            f"Expected to read the checkpoints in {os.fspath(folder)!r}. Found: {error}. Make the folder readable."
        ) from error


def _newest_whole(folder: Path, step: int | None) -> tuple[Checkpoint | None, list[tuple[Found, Problem]]]:
    """Returns the newest whole checkpoint, and those that were passed over with what is wrong with them."""
    passed_over: list[tuple[Found, Problem]] = []
    for _ in range(_TRIES):
        passed_over.clear()
        for each in manifests_in(folder):
            if step is not None and each.step != step:
                continue
            problems = problems_in(folder, each)
            if each.manifest is not None and not problems:
                return _checkpoint(folder, each.path, each.manifest, passed_over), passed_over
            if not each.path.exists():  # removed as an old one, so that there are newer ones now
                break
            passed_over.append((each, problems[0]))
        else:
            break
    return None, passed_over


def problems_in(folder: Path, found: Found) -> list[Problem]:
    """Reads all of a checkpoint; returns what is damaged.

    Raises CheckpointError if another version of tfopt wrote it, OSError if it cannot be read for another reason.
    """
    manifest, error = found.manifest, found.error
    if manifest is None:
        if isinstance(error, CheckpointError) or (isinstance(error, OSError) and error.errno != errno.EIO):
            raise error
        kind = "unreadable" if isinstance(error, OSError) else "altered"
        return [Problem(os.fspath(found.path), kind, str(error))]
    places = manifest.by_blob()

    def check(blob: str) -> list[Problem]:
        return problems_of(path_of(folder, blob), blob, manifest.blobs[blob], places[blob])

    with ThreadPoolExecutor(max(1, math.ceil(host().cpus))) as threads:  # reading and hashing release the GIL
        return [problem for problems in threads.map(check, places) for problem in problems]


def _checkpoint(
    folder: Path, path: Path, manifest: Manifest, passed_over: Sequence[tuple[Found, Problem]]
) -> Checkpoint:
    for each, problem in passed_over:
        warn_once(
            f"damaged_checkpoint {each.path}",
            f"Expected the checkpoint {os.fspath(each.path)!r} to be whole. Found {problem}. The one of step "
            f"{manifest.step}, {os.fspath(path)!r}, is taken instead. Check the disk; `tfopt.checkpoint.verify` lists "
            "all that is damaged.",
        )
    return Checkpoint(
        path=path,
        step=manifest.step,
        time=manifest.time,
        metadata=manifest.metadata,
        arrays=StoredArrays(folder, manifest.arrays),
        manifest=manifest,
        passed_over=tuple(each.path for each, _ in passed_over),
    )
