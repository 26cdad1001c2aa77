"""Lists the checkpoints in a folder, and finds damaged ones."""

import datetime
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tfopt.checkpoint.folder.keeping import best_of
from tfopt.checkpoint.folder.manifest import Found
from tfopt.checkpoint.folder.reading import checked, manifests_in, problems_in
from tfopt.errors import CheckpointError
from tfopt.pipelines.shared.problems import Problem, Report, listed
from tfopt.text import Shown
from tfopt.warn import warn_once


@dataclass(frozen=True, slots=True, repr=False)
class SavedCheckpoint(Shown):
    """A checkpoint in a folder."""

    step: int
    """Of the training."""
    time: datetime.datetime
    """When it was saved, in UTC."""
    size_mib: float
    """Of all its arrays; on the disk, checkpoints share what did not change between them."""
    metadata: dict[str, Any]
    """What was saved beside the arrays, such as the epoch and the metrics."""
    best: bool
    """Whether it is kept as the best."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return asdict(self) | {"time": self.time.isoformat()}

    def __str__(self) -> str:
        metrics = self.metadata.get("metrics")
        named = metrics.items() if isinstance(metrics, dict) else ()
        shown = [f"{name} {value:.4g}" for name, value in named if isinstance(value, float)]
        parts = [f"step {self.step:,}", f"{self.time:%Y-%m-%d %H:%M:%S} UTC", f"{self.size_mib:,.1f} MiB", *shown]
        return ", ".join(parts) + " (best)" * self.best


@dataclass(frozen=True, slots=True, repr=False)
class CheckpointReport(Report):
    """What `verify` found."""

    def __str__(self) -> str:
        checked = f"{self.files:,} checkpoint{'s' * (self.files != 1)}"
        if self.passed:
            return f"{checked}: every checksum matches"
        return f"{checked}: {len(self.problems):,} problem{'s' * (len(self.problems) != 1)}\n{listed(self.problems)}"


def available(folder: str | os.PathLike[str]) -> tuple[SavedCheckpoint, ...]:
    """Lists the checkpoints of a folder, newest first, reading only their manifests.

    Use it to choose a step to restore. A checkpoint whose manifest is damaged is left out with a warning that names the
    file; `verify` also reads the arrays. Nothing is changed.

    Args:
        folder: Where the training saves.

    Raises:
        TypeError: If `folder` is not a path.
        ValueError: If `folder` is a file.
        tfopt.errors.CheckpointError: If the folder cannot be read.

    Example:
        >>> for each in tfopt.checkpoint.available("checkpoints"):
        ...     print(each)
        step 1,200, 2026-01-31 09:15:02 UTC, 384.0 MiB, val_loss 0.412 (best)
    """
    where, _ = checked(folder, None)
    found = manifests_in(where)
    for each in found:
        if each.manifest is None:
            warn_once(
                f"damaged_checkpoint {each.path}",
                f"Expected the manifest of a checkpoint in {os.fspath(each.path)!r}. Found: {each.error}. It is left "
                "out. Check the disk.",
            )
    manifests = [each.manifest for each in found if each.manifest]
    best = best_of(manifests, manifests[0].best) if manifests else None
    return tuple(
        SavedCheckpoint(each.step, each.time, each.size_bytes / 2**20, each.metadata, each is best)
        for each in manifests
    )


def verify(folder: str | os.PathLike[str], step: int | None = None) -> CheckpointReport:
    """Reads every checkpoint of a folder in full and reports what does not match its checksum. Changes nothing.

    Args:
        folder: Where the training saves.
        step: Check only the checkpoint of this step. Default: all.

    Returns:
        The report; `passed` is the verdict, `print` shows the damaged files.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `folder` is a file or `step` is negative.
        tfopt.errors.CheckpointError: If there is no checkpoint to check, or the folder cannot be read.

    Example:
        >>> print(tfopt.checkpoint.verify("checkpoints"))
        3 checkpoints: every checksum matches
    """
    where, step = checked(folder, step)
    found = [each for each in manifests_in(where) if step is None or each.step == step]
    if not found:
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise CheckpointError(f"Expected {which} in {os.fspath(where)!r}. Found none. Check the path.")
    problems: dict[Problem, list[int]] = {}  # checkpoints share files: the steps that each concerns
    files = len(found)
    for each in found:
        of_one = _problems(where, each)
        if of_one and not each.path.exists():  # removed meanwhile, as an old one
            files -= 1
        else:
            for problem in of_one:
                problems.setdefault(problem, []).append(each.step)
    shown = (replace(problem, what=f"{problem.what} ({_named(steps)})") for problem, steps in problems.items())
    return CheckpointReport(files, tuple(shown))


def _problems(folder: Path, found: Found) -> list[Problem]:
    try:
        return problems_in(folder, found)
    except (CheckpointError, OSError) as error:
        return [Problem(os.fspath(found.path), "unreadable", str(error))]


def _named(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) != 1)} {', '.join(map(str, reversed(steps)))}"
