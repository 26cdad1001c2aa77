"""Who trains together, and which of them this process is."""

from dataclasses import dataclass, field
from typing import Any

from tfopt.distribute.addresses import Address, brief, parse_address
from tfopt.errors import ClusterError
from tfopt.text import listed

ONE_PROCESS = "one process"

# A longer list is taken for a mistake: Linux holds 128 KiB in one environment variable, and every worker of a ring
# waits for every other.
MOST_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers that train one model together, one process each.

    `tfopt.distribute.resolve()` makes it from the environment; make one yourself only for a scheduler that tfopt does
    not know.

    Attributes:
        source: Where it was found: "arguments", "TF_CONFIG", "Slurm", "Kubernetes", or "one process" where nothing was.
        workers: Their addresses, "host:port", in the order of their ranks. Empty: this process trains alone.
        index: This process's rank, from 0.
        notes: What was looked for, in order, and what came of it.

    Raises:
        ClusterError: An address is wrong or there twice, the index is not one of a worker, or there are too many.

    Example:
        >>> print(Cluster("arguments", ("10.0.0.1:2222", "10.0.0.2:2222"), 1))
        worker 1 (10.0.0.2:2222) of 2 workers, from arguments
    """

    source: str
    workers: tuple[str, ...] = ()
    index: int = 0
    notes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.source != ONE_PROCESS or self.workers:
            _check_count(len(self.workers), self.source)
            _check_distinct(self.addresses(), self.source)
        check_index(self.index, len(self.workers) or 1, f"the index of this worker, from {self.source},")

    @property
    def is_chief(self) -> bool:
        """Whether this process writes the checkpoints and the logs: the worker of rank 0."""
        return self.index == 0

    @property
    def address(self) -> str | None:
        """This worker's own address. None for one process."""
        return self.workers[self.index] if self.workers else None

    @property
    def local_rank(self) -> int:
        """How many workers before this one stand on the same host."""
        machines = self._machines()
        return machines[: self.index].count(machines[self.index]) if machines else 0

    @property
    def local_workers(self) -> int:
        """How many workers stand on this worker's host, itself among them."""
        machines = self._machines()
        return machines.count(machines[self.index]) if machines else 1

    def addresses(self) -> list[Address]:
        """The workers' addresses, taken apart."""
        named = enumerate(self.workers)
        return [parse_address(address, whose=f"worker {rank} ({self.source})") for rank, address in named]

    def tf_config(self) -> dict[str, Any]:
        """The cluster as the variable TF_CONFIG holds it; empty for one process.

        A chief is its worker 0, for TensorFlow takes that one as the chief where there is no job of this name.

        Example:
            >>> Cluster("arguments", ("a:1", "b:1"), 1).tf_config()
            {'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}}
        """
        if not self.workers:
            return {}
        return {"cluster": {"worker": list(self.workers)}, "task": {"type": "worker", "index": self.index}}

    def explain(self) -> str:
        """What this process is, and below it what was looked for, found and taken."""
        return "\n  ".join([str(self), *self.notes, *self._placement()])

    def __str__(self) -> str:
        if not self.workers:
            return f"this process alone, from {self.source}" if self.source != ONE_PROCESS else ONE_PROCESS
        count = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        chief = ", the chief" if self.is_chief else ""
        return f"worker {self.index} ({self.address}{chief}) of {count}, from {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """The fields and what follows from them, as JSON values."""
        return {
            "source": self.source,
            "workers": list(self.workers),
            "index": self.index,
            "address": self.address,
            "is_chief": self.is_chief,
            "local_rank": self.local_rank,
            "local_workers": self.local_workers,
            "notes": list(self.notes),
        }

    def _machines(self) -> list[str]:
        return [address.machine for address in self.addresses()]

    def _placement(self) -> list[str]:
        if not self.workers:
            return []
        host = f"this host: local rank {self.local_rank} of {self.local_workers}"
        return [f"workers: {listed(self.workers, 8)}", host]


def check_index(index: object, count: int, what: str) -> int:
    """Returns the index.

    Raises:
        ClusterError: It is no integer from 0 to below the count.
    """
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count:
        return index
    raise ClusterError(
        f"Expected {what} as an integer from 0 to {count - 1}. Found: {brief(index)}. What to do: give every worker "
        "the same list of workers, and each its own place in it."
    )


def _check_count(count: int, source: str) -> None:
    if not 1 <= count <= MOST_WORKERS:
        raise ClusterError(
            f"Expected 1 to {MOST_WORKERS} workers from {source}. Found: {count}. What to do: list each process that "
            "trains once."
        )


def _check_distinct(addresses: list[Address], source: str) -> None:
    ranks: dict[tuple[str, int], int] = {}
    for rank, address in enumerate(addresses):
        first = ranks.setdefault((address.machine, address.port), rank)
        if first != rank:
            raise ClusterError(
                f"Expected an address of its own for every worker from {source}. Found: workers {first} and {rank} "
                f"both at port {address.port} of {address.host}. What to do: give one of them another port or host."
            )
