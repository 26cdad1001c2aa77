"""Which GPUs this worker takes: those that its launcher left it, divided among the workers on this host."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from tfopt.distribute.cluster import Cluster
from tfopt.errors import ClusterError
from tfopt.hardware.gpus import gpus
from tfopt.hardware.mig import mig_instances

NAME = "CUDA_VISIBLE_DEVICES"

# A launcher that gives each worker GPUs of its own sets it, to any value: "0,1" alone could be for all of them.
ASSIGNED = "TFOPT_GPUS_ASSIGNED"


@dataclass(frozen=True, slots=True)
class VisibleDevices:
    """What CUDA_VISIBLE_DEVICES is to be for this process.

    Attributes:
        value: None: the variable stays unset.
        reason: Why.
    """

    value: str | None
    reason: str

    def __str__(self) -> str:
        return f"{NAME}{' unset' if self.value is None else f'={self.value}'}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def visible_devices(environ: Mapping[str, str], cluster: Cluster) -> VisibleDevices:
    """Returns the CUDA_VISIBLE_DEVICES for this worker; to be set before TensorFlow looks for GPUs.

    What a launcher set is never replaced, only narrowed: the workers on a host divide its entries in equal blocks, in
    their order. With MIG each takes one entry, for CUDA uses one instance in a process. One entry, or fewer than there
    are workers on the host, or than Slurm's step has there, are taken for this worker's own. Where the variable is
    unset and several workers stand on the host, they divide all its GPUs.

    Args:
        environ: Read for CUDA_VISIBLE_DEVICES, for TFOPT_GPUS_ASSIGNED, set where the launcher has divided them, and
            in a Slurm step for SLURM_GPUS_ON_NODE.
        cluster: From `resolve()`.

    Raises:
        ClusterError: There are fewer GPUs than workers on the host, which NCCL does not let share one.

    Example:
        >>> print(visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, Cluster("x", ("a:1", "a:2"), 1)))
        CUDA_VISIBLE_DEVICES=6,7: 2 of 4 GPUs, local rank 1 of 2
    """
    value = environ.get(NAME)
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
    """How many GPUs a Slurm step has on this node; a task that sees fewer was bound to them (--gpus-per-task)."""
    count = environ.get("SLURM_GPUS_ON_NODE", "")
    return int(count) if re.fullmatch("[0-9]{1,4}", count) else 0


def _narrowed(value: str | None, entries: list[str], cluster: Cluster) -> VisibleDevices:
    workers, rank = cluster.local_workers, cluster.local_rank
    if len(entries) < workers:
        if value is None:
            raise _too_few(entries, workers)
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
    """Returns the entries that CUDA reads from CUDA_VISIBLE_DEVICES; where it is unset, one for each GPU that is there.

    Example:
        >>> visible_entries({"CUDA_VISIBLE_DEVICES": "2,0,-1,3"})
        ['2', '0']
    """
    value = environ.get(NAME)
    if value is None:
        # Instances first: of several, gpus() shows the one that CUDA would take, with a warning.
        return list(mig_instances()) or [str(gpu.index) for gpu in gpus(environ=environ)]
    # CUDA reads up to the first that names no device, and none at all if one is there twice.
    entries = [entry.strip() for entry in value.split(",")]
    read = list(takewhile(lambda entry: entry not in ("", "NoDevFiles") and entry[0] != "-", entries))
    return read if len(set(read)) == len(read) else []


def _too_few(entries: list[str], workers: int) -> ClusterError:
    return ClusterError(
        f"Expected a GPU for each of the {workers} workers on this host. Found: {len(entries)} ({', '.join(entries)}), "
        "and NCCL does not let workers share one. What to do: start fewer workers here, or train on the CPUs, with "
        f"{NAME}=-1."
    )
