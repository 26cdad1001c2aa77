"""Several workers that train one model: which one this process is, and the chief's summary of all."""

import functools
import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfopt.callbacks.shared.background import Background
from tfopt.files import write_atomic
from tfopt.warn import warn_once

# Tasks that run `fit` together. A parameter server does not run it; an evaluator runs it on its own.
_TRAINING = ("chief", "master", "worker")
_SUMMARY = "utilization-summary"
# Workers end an epoch at slightly different times: the chief may find the previous epoch's summary.
_EPOCHS_BEHIND = 1


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """A process among those that train one model."""

    task: str | None = None
    """Its name in the cluster, `worker1`; None if it trains alone."""
    is_chief: bool = True
    tasks: tuple[str, ...] = ()
    """All tasks that train, including this one unless it is an evaluator."""

    @property
    def rank(self) -> int | None:
        """Its place among the tasks that train, from 0; None for an evaluator."""
        if self.task is None:
            return 0
        return self.tasks.index(self.task) if self.task in self.tasks else None

    def file_name(self, name: str) -> str:
        """Returns `name` for a process that trains alone, with the task appended for one of several workers."""
        return name if self.task is None else f"{name}-{self.task}"


def worker_rank(environ: Mapping[str, str] = os.environ) -> WorkerRank:
    """Reads this process's rank from TF_CONFIG; an invalid one is warned of once and counts as training alone.

    As in TensorFlow, the chief is the task of that name, or worker 0 if there is none.

    Example:
        >>> cluster = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
        >>> worker_rank({"TF_CONFIG": cluster})
        WorkerRank(task='worker1', is_chief=False, tasks=('worker0', 'worker1'))
    """
    text = environ.get("TF_CONFIG", "").strip()
    try:
        return _parsed(json.loads(text)) if text else WorkerRank()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        warn_once(
            "TF_CONFIG",
            "Expected TF_CONFIG to hold a cluster and a task, such as "
            '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}. '
            f"Found {text[:200]!r} ({error!r}). This process logs as if it trained alone. Fix TF_CONFIG, or unset it.",
        )
        return WorkerRank()


def _parsed(config: Mapping[str, Any]) -> WorkerRank:
    cluster = config.get("cluster") or {}
    tasks = tuple(f"{kind}{index}" for kind in _TRAINING for index in _indices(cluster.get(kind, ())))
    if not tasks:
        return WorkerRank()
    own = config["task"]
    task = f"{own['type']}{int(own.get('index', 0))}"
    if own["type"] in cluster and task not in tasks and own["type"] in _TRAINING:
        raise ValueError(f"{task} is not in the cluster")
    if tasks == (task,):
        return WorkerRank()
    return WorkerRank(task, task == tasks[0], tasks)


def _indices(members: Any) -> list[int]:
    """The task numbers of a list of addresses, or of a dict of addresses by number."""
    if isinstance(members, str):
        raise TypeError(f"{members!r} is not a list of addresses")
    return sorted(map(int, members)) if isinstance(members, Mapping) else list(range(len(members)))


class WorkerSummaries:
    """Writes this worker's summary of each epoch, `utilization-summary-TASK.json`, and on the chief the merged one.

    It works in its own thread, and no worker waits for another: after each of its epochs and at the end of `fit` the
    chief merges the summaries it finds. A worker with a different folder is missing from the merged summary.
    """

    def __init__(self, folder: Path, rank: WorkerRank):
        self._rank = rank
        self._last: dict[str, Any] | None = None
        self._background = Background("utilization summary", functools.partial(_write, folder, rank))
        self._background.put({})

    def put(self, epoch: int, figures: Mapping[str, float], *, gpus: int) -> None:
        """Queues an epoch's figures; never blocks."""
        summary = {"task": self._rank.task, "epoch": epoch, "time_seconds": time.time(), "gpus": gpus}
        self._last = {**summary, "figures": dict(figures)}
        self._background.put(self._last)

    def close(self) -> None:
        """Waits a few seconds for queued writes. A second call does nothing."""
        if self._rank.is_chief and self._last is not None:
            self._background.put(self._last)  # to merge what the others have written since
        self._background.close()


def merge(folder: Path, rank: WorkerRank, *, epoch: int) -> dict[str, Any]:
    """Merges the workers' summaries in a folder, for the chief, which knows all workers.

    Workers more than one epoch behind the chief's `epoch` are stale and left out of the overall figures: each figure's
    mean, minimum and maximum over the workers. Sums are None unless all workers reported.
    """
    found = {task: summary for task in rank.tasks if (summary := _read(_path(folder, task))) is not None}
    stale = [task for task, summary in found.items() if summary["epoch"] < epoch - _EPOCHS_BEHIND]
    fresh = [summary for task, summary in found.items() if task not in stale]
    values: dict[str, list[float]] = {}
    for summary in fresh:
        for name, value in summary["figures"].items():
            values.setdefault(name, []).append(value)
    complete = len(fresh) == len(rank.tasks)
    joules = values.get("gpu_energy_joules", [])
    return {
        "epoch": epoch,
        "time_seconds": time.time(),
        "missing": [task for task in rank.tasks if task not in found],
        "stale": stale,
        "gpus": sum(summary["gpus"] for summary in fresh) if complete else None,
        "gpu_energy_joules": math.fsum(joules) if len(joules) == len(rank.tasks) else None,
        "gpu_memory_peak_mib": max(values.get("gpu_memory_peak_mib", []), default=None),
        "overall": {name: _spread(seen) for name, seen in sorted(values.items())},
        "workers": found,
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"mean": math.fsum(values) / len(values), "min": min(values), "max": max(values)}


def _path(folder: Path, task: str | None) -> Path:
    return folder / f"{_SUMMARY}-{task}.json"


def _write(folder: Path, rank: WorkerRank, summary: dict[str, Any]) -> None:
    """Writes a summary in the background thread; an empty one: removes an earlier run's."""
    if not summary:
        with suppress(OSError):
            _path(folder, rank.task).unlink(missing_ok=True)
        return
    write_atomic(_path(folder, rank.task), json.dumps(summary))
    if rank.is_chief:
        merged = merge(folder, rank, epoch=summary["epoch"])
        write_atomic(folder / f"{_SUMMARY}.json", json.dumps(merged, indent=2))


def _read(path: Path) -> dict[str, Any] | None:
    """A worker's summary; None if there is no valid one."""
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
        numbers = [summary["epoch"], summary["gpus"], *summary["figures"].values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return summary if all(isinstance(number, int | float) for number in numbers) else None
