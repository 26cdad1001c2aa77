"""Which GPUs this worker takes: those that its launcher left it, divided among the workers on this host."""

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


def visible_devices(
    environ: Mapping[str, str], cluster: Cluster, *, devices_per_worker: int | None = None
) -> VisibleDevices:
    """Returns the CUDA_VISIBLE_DEVICES for this worker; to be set before TensorFlow looks for GPUs.

    What a launcher set is never replaced, only narrowed: the workers on a host divide its entries in equal blocks, in
    their order. With MIG each takes one entry, for CUDA uses one instance in a process. One entry, or fewer than there
    are workers on the host, are taken for this worker's own. Where the variable is unset and several workers stand on
    the host, they divide all its GPUs.

    Args:
        environ: Read for CUDA_VISIBLE_DEVICES, and TFOPT_GPUS_ASSIGNED: set where the launcher has divided them.
        cluster: From `resolve()`.
        devices_per_worker: Take so many, and leave the others unused. Default: all, divided by the workers.

    Raises:
        TypeError: `devices_per_worker` is no integer.
        ValueError: It is below 1.
        ClusterError: There are not so many.

    Example:
        >>> print(visible_devices({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, Cluster("x", ("a:1", "a:2"), 1)))
        CUDA_VISIBLE_DEVICES=6,7: 2 of 4 GPUs, local rank 1 of 2
    """
    _check_argument(devices_per_worker)
    value = environ.get(NAME)
    if value is None and cluster.local_workers == 1 and devices_per_worker is None:
        return VisibleDevices(None, "the only worker on this host takes all GPUs")
    if value is not None and ASSIGNED in environ:
        return VisibleDevices(value, "the launcher gave each worker its own")
    entries = visible_entries(environ)
    if not entries:
        return VisibleDevices(value, "no GPU")
    return _narrowed(value, entries, cluster, devices_per_worker)


def _narrowed(value: str | None, entries: list[str], cluster: Cluster, wanted: int | None) -> VisibleDevices:
    workers, rank = cluster.local_workers, cluster.local_rank
    mig = any(entry.startswith("MIG-") for entry in entries)
    each = wanted or (1 if mig else max(1, len(entries) // workers))
    enough = len(entries) >= workers * each
    given = value is not None and len(entries) == each  # to this worker alone, by its launcher
    if wanted is not None and ((mig and wanted > 1) or not (enough or given)):
        raise _too_few(entries, wanted, workers)
    if not enough and value is None:
        return VisibleDevices(
            None, f"fewer GPUs ({len(entries)}) than workers here ({workers}): NCCL refuses to share one"
        )
    if not enough:
        return VisibleDevices(value, f"taken for this worker's own: too few to divide among {workers}")
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


def _check_argument(devices_per_worker: int | None) -> None:
    if devices_per_worker is None:
        return
    if not isinstance(devices_per_worker, int) or isinstance(devices_per_worker, bool):
        kind = type(devices_per_worker).__name__
        raise TypeError(f"Expected devices_per_worker as an integer. Received: {kind}. What to do: give an int.")
    if devices_per_worker < 1:
        raise ValueError(
            f"Expected devices_per_worker of 1 or more. Received: {devices_per_worker}. What to do: hide the GPUs with "
            f"{NAME}=-1 to train on CPUs."
        )


def _too_few(entries: list[str], wanted: int, workers: int) -> ClusterError:
    return ClusterError(
        f"Expected {wanted} GPUs for each of the {workers} workers on this host, and of MIG instances 1, for CUDA uses "
        f"one in a process. Found: {len(entries)} ({', '.join(entries)}). What to do: start fewer workers on the host, "
        "or ask for fewer GPUs for each."
    )
