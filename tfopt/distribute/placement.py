"""Divides a host's GPUs and CPUs among its workers, within what the launcher gave each."""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from tfopt.distribute.cluster.membership import Cluster, cluster_error
from tfopt.hardware.host_limits import host, usable_cpus
from tfopt.hardware.inventory import Gpu, cpu_affinity, ends_list, gpus, mig_instances

VISIBLE = "CUDA_VISIBLE_DEVICES"

# A launcher that gives each worker its own GPUs sets this to any value; "0,1" alone could be meant for all workers.
ASSIGNED = "TFOPT_GPUS_ASSIGNED"


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """This process's CUDA_VISIBLE_DEVICES."""

    value: str | None
    """None leaves the variable unset."""
    reason: str

    def __str__(self) -> str:
        return f"{VISIBLE}{' unset' if self.value is None else f'={self.value}'}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def visible_devices(environ: Mapping[str, str], cluster: Cluster) -> VisibleDevices:
    """Returns this worker's CUDA_VISIBLE_DEVICES, to be set before TensorFlow looks for GPUs.

    A launcher's value is narrowed, never replaced: the workers on a host divide its entries into equal blocks, in
    order. Of MIG instances each worker gets one, since CUDA uses one per process. A single entry, or fewer entries than
    the host has workers or the Slurm step has GPUs there, is taken to be this worker's own. If the variable is unset
    and several workers share the host, they divide all its GPUs.

    Raises:
        ClusterError: If the host has fewer GPUs than workers, since NCCL does not let workers share one.

    Example:
        >>> print(visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, Cluster("x", ("a:1", "a:2"), 1)))
        CUDA_VISIBLE_DEVICES=6,7: 2 of 4 GPUs, local rank 1 of 2
    """
    value = environ.get(VISIBLE)
    if value is None and cluster.local_workers == 1:
        return VisibleDevices(None, "the only worker on this host takes all GPUs")
    if value is not None and ASSIGNED in environ:
        return VisibleDevices(value, "this worker's own, says " + ASSIGNED)
    entries = visible_entries(environ)
    if not entries:
        return VisibleDevices(value, "no GPU")
    if value is not None and cluster.source == "Slurm" and len(entries) < _gpus_of_step(environ):
        return VisibleDevices(value, "Slurm gave each task its own")
    return _narrowed(value, entries, cluster)


def _gpus_of_step(environ: Mapping[str, str]) -> int:
    """The GPUs of a Slurm step on this node. A task that sees fewer was bound to them (--gpus-per-task)."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if re.fullmatch("[0-9]{1,4}", count) else 0


def _narrowed(value: str | None, entries: list[str], cluster: Cluster) -> VisibleDevices:
    workers, rank = cluster.local_workers, cluster.local_rank
    if len(entries) < workers:
        if value is None:
            raise cluster_error(
                f"a GPU for each of the {workers} workers on this host",
                f"{len(entries)} ({', '.join(entries)}), and NCCL does not let workers share one",
                f"start fewer workers here, or train on the CPUs with {VISIBLE}=-1",
            )
        return VisibleDevices(value, f"taken for this worker's own: too few to divide among {workers}")
    mig = any(entry.startswith("MIG-") for entry in entries)
    each = 1 if mig else len(entries) // workers
    own = entries[rank * each : (rank + 1) * each]
    if own == entries:
        return VisibleDevices(value, "the only worker on this host takes all GPUs")
    unused = len(entries) - workers * each
    rest = f", {unused} left unused" if unused else ""
    return VisibleDevices(",".join(own), f"{each} of {len(entries)} GPUs, local rank {rank} of {workers}{rest}")


def visible_entries(environ: Mapping[str, str]) -> list[str]:
    """Returns the entries CUDA reads from CUDA_VISIBLE_DEVICES or, if it is unset, one for each GPU of the machine.

    Example:
        >>> visible_entries({"CUDA_VISIBLE_DEVICES": "2,0,-1,3"})
        ['2', '0']
    """
    value = environ.get(VISIBLE)
    if value is None:
        # MIG instances first: gpus() warns and returns only the one that CUDA would take.
        return list(mig_instances()) or [str(gpu.index) for gpu in gpus(environ=environ)]
    entries = [entry.strip() for entry in value.split(",")]
    read = list(takewhile(lambda entry: not ends_list(entry), entries))
    return read if len(set(read)) == len(read) else []  # CUDA uses no GPU at all if one is listed twice


@dataclass(frozen=True, slots=True)
class CpuBinding:
    """The CPUs this process runs on."""

    before: frozenset[int]
    """CPUs it was started with."""
    after: frozenset[int]
    """CPUs it has now: those of `before` near its GPUs, if known."""
    reason: str

    def __str__(self) -> str:
        return f"{len(self.after)} of {len(self.before)} CPUs: {self.reason}"


def bind_cpus(used: Iterable[Gpu]) -> CpuBinding:
    """Binds this thread, and those it starts from now on, to the CPUs near the GPUs.

    Call it before TensorFlow starts its threads; running threads are not moved. It never adds CPUs, and if none of the
    process's CPUs is near a GPU it keeps all of them.
    """
    before = frozenset(usable_cpus())
    near = [cpu_affinity(gpu) for gpu in used]
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


def threads(cluster: Cluster, binding: CpuBinding) -> tuple[int, str]:
    """Returns a size for TensorFlow's thread pools that keeps a host's workers off each other's CPUs, and the reason.

    By default each TensorFlow process starts a thread per CPU, so workers that share the CPUs start too many. Set the
    size with `tf.config.threading`, for inter-op threads as well (TensorFlow's default too), before TensorFlow runs
    anything. The workers divide the CPUs, unless the parent process may use more of them than this one: then the
    launcher gave each worker its own.
    """
    workers = cluster.local_workers
    sharing = workers if _shared(binding.before) else 1
    share = min(len(binding.before) / sharing, len(binding.after))
    quota = host().quota_cpus
    if quota is not None:
        share = min(share, quota / workers)
    size = max(1, int(share))
    among = f"shared by {sharing} workers" if sharing > 1 else "for this worker"
    limit = "" if quota is None else f", of which the control group allows {quota:g}"
    return size, f"{size} intra-op and {size} inter-op threads: {len(binding.before)} CPUs {among}{limit}"


def _shared(cpus: frozenset[int]) -> bool:
    """Whether the other workers on this host run on the same CPUs."""
    try:
        return not os.sched_getaffinity(os.getppid()) > cpus
    except (OSError, AttributeError):  # the parent has ended; not on Linux
        return True
