"""Which CPUs this worker runs on, and how many threads it should start there."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tfopt.distribute.cluster import Cluster
from tfopt.hardware.affinity import cpu_affinity
from tfopt.hardware.gpus import Gpu
from tfopt.hardware.host import host, usable_cpus


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs of this process.

    Attributes:
        before: Those that it was started with.
        after: Those that it has now: of `before` the ones near its GPUs, where these are known.
        reason: Why `after` is what it is.
    """

    before: frozenset[int]
    after: frozenset[int]
    reason: str

    def __str__(self) -> str:
        return f"{len(self.after)} of {len(self.before)} CPUs: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self) | {"before": sorted(self.before), "after": sorted(self.after)}


@dataclass(frozen=True, slots=True)
class Threads:
    """The sizes of TensorFlow's thread pools.

    Attributes:
        intra_op: Threads that share the work of one operation: the worker's share of the CPUs.
        inter_op: Operations that run at once: as many, as TensorFlow's own default has it.
        reason: How they were counted.
    """

    intra_op: int
    inter_op: int
    reason: str

    def __str__(self) -> str:
        return f"{self.intra_op} intra-op and {self.inter_op} inter-op threads: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def bind_cpus(gpus: Iterable[Gpu]) -> CpuBinding:
    """Keeps this thread, and those that it starts from now on, on the CPUs near the GPUs.

    Call it before TensorFlow starts its threads: those that run already stay where they are. CPUs that the process was
    not started with are never added, and if none of its own are near a GPU, all are kept.

    Args:
        gpus: Those that this process uses, from `tfopt.hardware.gpus()`.

    Returns:
        What was done, and why. Where nothing could be done, `after` is `before`, and the reason says so.

    Example:
        >>> print(bind_cpus(tfopt.hardware.gpus()))
    """
    before = frozenset(usable_cpus())
    near = [cpu_affinity(gpu) for gpu in gpus]
    if not near:
        return CpuBinding(before, before, "no GPU to be near to")
    if None in near:
        return CpuBinding(before, before, "the driver does not say which are near the GPUs")
    after = before.intersection(frozenset().union(*filter(None, near)))
    if not after:
        return CpuBinding(before, before, "none of them is near the GPUs")
    if after == before:
        return CpuBinding(before, before, "all are near the GPUs")
    try:
        os.sched_setaffinity(0, after)
    except OSError as error:
        return CpuBinding(before, before, f"the system refused to bind the process to {len(after)} ({error.strerror})")
    return CpuBinding(before, after, "those near the GPUs")


def threads(cluster: Cluster, *, binding: CpuBinding | None = None) -> Threads:
    """Returns the sizes of the thread pools that keep the workers of a host off each other's CPUs.

    TensorFlow starts as many threads as the process may use CPUs, so that two workers that share all of them start
    twice as many as there are CPUs. Set the sizes with `tf.config.threading` before TensorFlow runs anything.

    The CPUs are divided among the workers of the host unless the parent process may use more of them than this one:
    then the launcher gave each worker CPUs of its own.

    Args:
        cluster: From `resolve()`.
        binding: What `bind_cpus` returned. Default: it was not called, and the process runs on all its CPUs.

    Returns:
        The sizes, both at least 1, and how they were counted.

    Example:
        >>> print(threads(resolve()))
    """
    cpus = frozenset(usable_cpus())
    binding = binding or CpuBinding(cpus, cpus, "not bound")
    workers = cluster.local_workers
    sharing = workers if _shared(binding.before) else 1
    share = min(len(binding.before) / sharing, len(binding.after))
    quota = host().quota_cpus
    if quota is not None:
        share = min(share, quota / workers)
    size = max(1, int(share))
    among = f"shared by {sharing} workers" if sharing > 1 else "for this worker"
    limit = "" if quota is None else f", of which the control group allows {quota:g}"
    return Threads(size, size, f"{len(binding.before)} CPUs {among}{limit}")


def _shared(cpus: frozenset[int]) -> bool:
    """Whether the workers beside this one run on the same CPUs."""
    try:
        return not os.sched_getaffinity(os.getppid()) > cpus
    except (OSError, AttributeError):  # the parent has ended; not on Linux
        return True
