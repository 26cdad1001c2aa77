"""The workers of a cluster, and which of them this process is."""

from dataclasses import dataclass, field
from typing import Any

from tfopt.distribute.cluster.addresses import Address, brief, cluster_error, parse_address
from tfopt.text import listed

ONE_PROCESS = "one process"

# More must be a mistake: a Linux environment variable holds 128 KiB, and in a ring every worker waits for all others.
MAX_WORKERS = 4096


@dataclass(frozen=True, slots=True)
class Cluster:
    """The workers that train one model together, one process each.

    `tfopt.distribute.resolve()` creates it from the environment. Create one yourself only for a scheduler that tfopt
    does not support.

    Raises:
        ClusterError: If an address is malformed or listed twice, `index` is not a worker's, or there are more than
            4,096 workers.

    Example:
        >>> print(Cluster("arguments", ("10.0.0.1:2222", "10.0.0.2:2222"), 1))
        worker 1 (10.0.0.2:2222) of 2 workers, from arguments
    """

    source: str
    """Where it was found: "arguments", "TF_CONFIG", "Slurm", "Kubernetes", or "one process" if nowhere."""
    workers: tuple[str, ...] = ()
    """Addresses, "host:port", in rank order. Empty if this process trains alone."""
    index: int = 0
    """This process's rank, from 0."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """Each source tried, in order, and its outcome."""

    def __post_init__(self) -> None:
        if self.source != ONE_PROCESS or self.workers:
            if not 1 <= len(self.workers) <= MAX_WORKERS:
                raise cluster_error(
                    f"1 to {MAX_WORKERS} workers from {self.source}",
                    str(len(self.workers)),
                    "list each training process once",
                )
            _check_distinct(self.addresses(), self.source)
        check_index(self.index, len(self.workers) or 1, f"the index of this worker, from {self.source},")

    @property
    def is_chief(self) -> bool:
        """Whether this process has rank 0 and so writes the checkpoints and the logs."""
        return self.index == 0

    @property
    def address(self) -> str | None:
        """This worker's address; None for a process that trains alone."""
        return self.workers[self.index] if self.workers else None

    @property
    def local_rank(self) -> int:
        """Number of workers with a lower rank on the same host."""
        machines = self._machines()
        return machines[: self.index].count(machines[self.index]) if machines else 0

    @property
    def local_workers(self) -> int:
        """Number of workers on this host, including this one."""
        machines = self._machines()
        return machines.count(machines[self.index]) if machines else 1

    def addresses(self) -> list[Address]:
        """The workers' addresses, parsed."""
        named = enumerate(self.workers)
        return [parse_address(address, whose=f"worker {rank} ({self.source})") for rank, address in named]

    def tf_config(self) -> dict[str, Any]:
        """Returns the cluster as TF_CONFIG describes it; empty for a process that trains alone.

        There is no job named "chief", so TensorFlow takes worker 0 as the chief.

        Example:
            >>> Cluster("arguments", ("a:1", "b:1"), 1).tf_config()
            {'cluster': {'worker': ['a:1', 'b:1']}, 'task': {'type': 'worker', 'index': 1}}
        """
        if not self.workers:
            return {}
        return {"cluster": {"worker": list(self.workers)}, "task": {"type": "worker", "index": self.index}}

    def explain(self) -> str:
        """Returns what this process is, and which sources were tried."""
        placement = []
        if self.workers:
            host = f"this host: local rank {self.local_rank} of {self.local_workers}"
            placement = [f"workers: {listed(self.workers, 8)}", host]
        return "\n  ".join([str(self), *self.notes, *placement])

    def __str__(self) -> str:
        if not self.workers:
            return f"this process alone, from {self.source}" if self.source != ONE_PROCESS else ONE_PROCESS
        count = "1 worker" if len(self.workers) == 1 else f"{len(self.workers)} workers"
        chief = ", the chief" if self.is_chief else ""
        return f"worker {self.index} ({self.address}{chief}) of {count}, from {self.source}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields and properties as JSON values."""
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


def check_index(index: object, count: int, what: str) -> int:
    """Returns `index`; raises ClusterError if it is not an integer from 0 to `count` - 1."""
    if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < count:
        return index
    raise cluster_error(
        f"{what} as an integer from 0 to {count - 1}",
        brief(index),
        "give every worker the same list of workers and its own place in it",
    )


def _check_distinct(addresses: list[Address], source: str) -> None:
    ranks: dict[tuple[str, int], int] = {}
    for rank, address in enumerate(addresses):
        first = ranks.setdefault((address.machine, address.port), rank)
        if first != rank:
            raise cluster_error(
                f"every worker from {source} to have its own address",
                f"workers {first} and {rank} both at port {address.port} of {address.host}",
                "give one of them another port or host",
            )
