"""Which of several workers this process is."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfopt.warn import warn_once

# Tasks that run `fit`. A parameter server does not; an evaluator does for itself.
_TRAINING = ("chief", "master", "worker")


@dataclass(frozen=True, slots=True)
class Rank:
    """A process among those that train one model.

    Attributes:
        task: Its name in the cluster, `worker1`; None where it trains alone.
        is_chief: Whether it does what one of them has to do.
        tasks: All that train, this one included unless it is an evaluator.
    """

    task: str | None = None
    is_chief: bool = True
    tasks: tuple[str, ...] = ()

    def file_name(self, name: str) -> str:
        """The name of this process's own file: `utilization`, of several workers `utilization-worker1`.

        Example:
            >>> Rank("worker1").file_name("utilization")
            'utilization-worker1'
        """
        return name if self.task is None else f"{name}-{self.task}"


def rank(environ: Mapping[str, str] = os.environ) -> Rank:
    """Returns this process's rank, as the variable TF_CONFIG tells it. One that makes no sense is warned of once.

    Chief is the task of that name, and without one worker 0, as in TensorFlow.

    Args:
        environ: Where TF_CONFIG is read. Default: this process's environment.

    Example:
        >>> rank({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'})
        Rank(task='worker1', is_chief=False, tasks=('worker0', 'worker1'))
    """
    text = environ.get("TF_CONFIG", "").strip()
    try:
        return _rank(json.loads(text)) if text else Rank()
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        warn_once(
            "TF_CONFIG",
            "Expected TF_CONFIG to hold a cluster and a task, such as "
            '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}. '
            f"Found {text[:200]!r} ({error!r}). This process logs as if it were alone. Mend TF_CONFIG, or unset it.",
        )
        return Rank()


def _rank(config: Mapping[str, Any]) -> Rank:
    cluster = config.get("cluster") or {}
    tasks = tuple(f"{kind}{index}" for kind in _TRAINING for index in _indices(cluster.get(kind, ())))
    if not tasks:
        return Rank()
    own = config["task"]
    task = f"{own['type']}{int(own.get('index', 0))}"
    if own["type"] in cluster and task not in tasks and own["type"] in _TRAINING:
        raise ValueError(f"{task} is not in the cluster")
    if tasks == (task,):
        return Rank()
    return Rank(task, task == tasks[0], tasks)


def _indices(members: Any) -> list[int]:
    """The task numbers of a list of addresses, or of a dict of them by number."""
    if isinstance(members, str):
        raise TypeError(f"{members!r} is no list of addresses")
    return sorted(map(int, members)) if isinstance(members, Mapping) else list(range(len(members)))
