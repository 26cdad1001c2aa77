"""Which of several workers this process is."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.warn import warn_once

# Tasks that run `fit` together. A parameter server does not run it; an evaluator runs it on its own.
_TRAINING = ("chief", "master", "worker")


@dataclass(frozen=True, slots=True)
class WorkerRank:
    """A process among those that train one model.

    Example:
        >>> WorkerRank("worker1").file_name("utilization")
        'utilization-worker1'
    """

    task: str | None = None
    """Its name in the cluster, `worker1`; None if it trains alone."""
    is_chief: bool = True
    tasks: tuple[str, ...] = ()
    """All tasks that train, including this one unless it is an evaluator."""

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
