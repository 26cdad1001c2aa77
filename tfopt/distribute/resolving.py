"""Finds out who trains together: arguments, then what a scheduler left in the environment, then one process."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tfopt.distribute.cluster import ONE_PROCESS, Cluster
from tfopt.distribute.kubernetes import from_kubernetes
from tfopt.distribute.slurm import from_slurm
from tfopt.distribute.tf_config import from_tf_config

# In this order; the first that finds a cluster is taken. Each returns the cluster, or in a line why there is none.
SOURCES: tuple[Callable[[Mapping[str, str]], Cluster | str], ...] = (from_tf_config, from_slurm, from_kubernetes)


def resolve(
    environ: Mapping[str, str] = os.environ, *, workers: Sequence[str] | None = None, index: int | None = None
) -> Cluster:
    """Returns the cluster that this process belongs to, without loading TensorFlow.

    Taken is the first of: the arguments, a valid TF_CONFIG (Ray sets it), a Slurm step, TFOPT_WORKERS in a pod of
    Kubernetes, this process alone. A cluster that is described wrongly is an error, and never "this process alone": its
    workers would each train a model of their own.

    Args:
        environ: Where TF_CONFIG and the schedulers' variables are read. Default: this process's environment.
        workers: The addresses of all workers, "host:port", in the order of their ranks. Default: looked for.
        index: This process's place in `workers`, from 0. Goes with `workers`.

    Raises:
        TypeError: `workers` is no sequence.
        ValueError: Of `workers` and `index` only one is given.
        ClusterError: The cluster is described wrongly; the text names the part.

    Example:
        >>> print(resolve({}).explain())
        one process
          arguments: none
          TF_CONFIG: not set
          Slurm: not in a job
          Kubernetes: not in a pod
    """
    if workers is not None or index is not None:
        return _from_arguments(workers, index)
    notes = ["arguments: none"]
    for source in SOURCES:
        found = source(environ)
        if isinstance(found, Cluster):
            return replace(found, notes=(*notes, f"{found.source}: taken"))
        notes.append(found)
    return Cluster(ONE_PROCESS, notes=tuple(notes))


def _from_arguments(workers: Sequence[str] | None, index: int | None) -> Cluster:
    if workers is None or index is None:
        missing = "workers" if workers is None else "index"
        raise ValueError(f"Expected workers and index, or neither. Received: no {missing}. What to do: give both.")
    if isinstance(workers, str) or not isinstance(workers, Sequence):
        raise TypeError(
            f"Expected workers as a list of addresses. Received: {workers!r}. What to do: write ['host:port', …]."
        )
    return Cluster("arguments", tuple(workers), index, ("arguments: taken; the environment was not looked at",))
