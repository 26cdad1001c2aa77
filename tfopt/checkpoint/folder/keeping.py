"""Which checkpoints stay, and the removal of the others."""

import os
from collections.abc import Collection, Iterable
from pathlib import Path

from tfopt.checkpoint.folder.blobs import blobs_in, path_of
from tfopt.checkpoint.folder.manifest import DamagedError, Found, Manifest, leftovers_in
from tfopt.files import sync


def best_of(manifests: Iterable[Manifest], best: tuple[str, str] | None) -> Manifest | None:
    """Returns the checkpoint with the best metric, the earliest of equal ones; None if none has it."""
    if best is None:
        return None
    name, which = best
    values = []
    for each in manifests:
        metrics = each.metadata.get("metrics")
        value = metrics.get(name) if isinstance(metrics, dict) else None
        if isinstance(value, int | float) and value == value:  # not NaN
            values.append((-value if which == "max" else value, each.number, each))
    return min(values)[-1] if values else None


def remove_old(
    folder: Path,
    found: Collection[Found],
    *,
    keep: int,
    best: tuple[str, str] | None,
    damaged: Collection[Path],
    since: int,
) -> None:
    """Removes all checkpoints but the newest whole ones and the best, and what no checkpoint needs then.

    `damaged` are manifests of checkpoints that are known to be damaged; those with a number below `since` are of a
    training that was replaced. Raises OSError.
    """
    whole = [each for each in found if each.path not in damaged and _seems_whole(folder, each)]
    by_step = {each.step: each for each in sorted(whole, key=lambda each: each.number)}  # the newest of each step
    newest = sorted((each for each in by_step.values() if each.number >= since), key=lambda each: -each.number)
    kept = {each.path for each in newest[:keep]}
    oldest = min((each.number for each in newest[:keep]), default=0)
    best_one = best_of([each.manifest for each in newest if each.manifest], best)
    kept |= {each.path for each in newest if each.manifest is best_one and best_one}
    lost = [each for each in found if each not in whole and each.number < oldest and _is_lost(each)]
    doomed = [each for each in whole if each.path not in kept] + lost
    for each in doomed:
        each.path.unlink()
    if doomed:
        sync(folder)  # before the blobs go, or a power loss could bring a manifest back without its blobs
    remove_unneeded(folder, [each for each in found if each not in doomed])


def remove_unneeded(folder: Path, found: Iterable[Found]) -> None:
    """Removes what killed writers left, and blobs that no checkpoint needs. Raises OSError."""
    unneeded = leftovers_in(folder)
    manifests = [each.manifest for each in found]
    # One that cannot be read, perhaps only now or only by this version, may need any blob.
    if None not in manifests:
        needed = {path_of(folder, blob) for manifest in manifests if manifest for blob in manifest.blobs}
        unneeded += [path for path in blobs_in(folder) if path not in needed]
    for path in unneeded:
        path.unlink()


def _seems_whole(folder: Path, found: Found) -> bool:
    """Whether a checkpoint's files are there and have the right sizes."""
    if found.manifest is None:
        return False
    try:
        sizes = {blob: os.stat(path_of(folder, blob)).st_size for blob in found.manifest.blobs}
    except FileNotFoundError:
        return False
    return all(size == found.manifest.blobs[blob].file_bytes for blob, size in sizes.items())


def _is_lost(found: Found) -> bool:
    """Whether a checkpoint is damaged for good; one of another version, or that cannot be read now, may be whole."""
    return found.manifest is not None or isinstance(found.error, DamagedError)
