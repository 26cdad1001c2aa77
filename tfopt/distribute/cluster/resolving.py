"""Finds the cluster this process belongs to, and the paths it may write to there."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tfopt.distribute.cluster.kubernetes import from_kubernetes
from tfopt.distribute.cluster.membership import ONE_PROCESS, Cluster, brief, cluster_error
from tfopt.distribute.cluster.slurm import from_slurm
from tfopt.distribute.cluster.tf_config import from_tf_config

# In order of precedence. Each returns the cluster, or one line that says why there is none.
SOURCES: tuple[Callable[[Mapping[str, str]], Cluster | str], ...] = (from_tf_config, from_slurm, from_kubernetes)

# How many processes a launcher says it has started, without saying where they are: Open MPI, PMI (MPICH, Intel MPI),
# MVAPICH, PyTorch's launchers.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")


def resolve(
    environ: Mapping[str, str] = os.environ, *, workers: Sequence[str] | None = None, index: int | None = None
) -> Cluster:
    """Finds the cluster this process belongs to, without loading TensorFlow.

    The first of these wins: the arguments, a valid TF_CONFIG (Ray sets it), a Slurm step, TFOPT_WORKERS in a Kubernetes
    pod, this process alone. A malformed description is an error, never "this process alone": each worker would train
    its own model. So is a launcher that says it has started several processes (OMPI_COMM_WORLD_SIZE, PMI_SIZE,
    MV2_COMM_WORLD_SIZE, WORLD_SIZE) where none of these says which.

    Args:
        environ: Where TF_CONFIG and the schedulers' variables are read. Default: this process's environment.
        workers: Addresses of all workers, "host:port", in rank order. Default: looked up in `environ`.
        index: This process's position in `workers`, from 0. Required with `workers`.

    Raises:
        TypeError: If `workers` is not a sequence of addresses.
        ValueError: If only one of `workers` and `index` is given.
        ClusterError: If the cluster is described wrongly; the message names the part.

    Example:
        >>> print(resolve({}).explain())
        one process
          arguments: none
          TF_CONFIG: not set
          Slurm: not in a job
          Kubernetes: not in a pod
    """
    if workers is not None or index is not None:
        if workers is None or index is None:
            missing = "workers" if workers is None else "index"
            raise ValueError(f"Expected workers and index, or neither. Received: no {missing}. What to do: give both.")
        if isinstance(workers, str) or not isinstance(workers, Sequence):
            raise TypeError(
                f"Expected workers as a list of addresses. Received: {workers!r}. What to do: write ['host:port', …]."
            )
        return Cluster("arguments", tuple(workers), index, ("arguments: taken; the environment was not read",))
    notes = ["arguments: none"]
    for source in SOURCES:
        found = source(environ)
        if isinstance(found, Cluster):
            return replace(found, notes=(*notes, f"{found.source}: taken"))
        notes.append(found)
    for name in _SIZES:
        size = environ.get(name, "").strip()
        if size.isdecimal() and size.lstrip("0") not in ("", "1"):
            raise cluster_error(
                f"the workers in TF_CONFIG, a Slurm step or TFOPT_WORKERS, since {name} says that there are several",
                f"{name}={brief(size)}, and none of the three",
                "start the script with srun or python -m tfopt.distribute.launch, or set TF_CONFIG in each process. To "
                f"train a model of its own in each, unset {name}",
            )
    return Cluster(ONE_PROCESS, notes=tuple(notes))


def own_path(path: str | Path, *, cluster: Cluster | None = None) -> Path:
    """Returns a path that only this worker writes to, in a script that every worker of a cluster runs.

    Use it with ModelCheckpoint, CSVLogger and the like: every worker has to write, since saving may need all of them.
    tfopt's own loggers use it already.

    Args:
        path: The file or folder.
        cluster: Default: this process's cluster, from `resolve()`.

    Returns:
        `path` for the chief or a single process; in worker 1, the file name is prefixed with `worker1-`.

    Example:
        >>> keras.callbacks.ModelCheckpoint(own_path("model.keras"))
    """
    cluster = cluster or resolve()
    path = Path(path)
    # Not a suffix, which would land inside an extension (`.weights.h5`) or a format (`{val_loss:.2f}`).
    return path if cluster.is_chief else path.with_name(f"worker{cluster.index}-{path.name}")
