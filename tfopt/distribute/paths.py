"""Where a worker writes: the chief to the path itself, the others beside it."""

from pathlib import Path

from tfopt.distribute.cluster import Cluster
from tfopt.distribute.resolving import resolve


def own_path(path: str | Path, *, cluster: Cluster | None = None) -> Path:
    """Returns the path that this worker may write to, where every worker of a cluster runs the same script.

    Give it to ModelCheckpoint, CSVLogger and the like: all workers write, as saving may need them all, and only the
    chief's file has the name that was asked for. tfopt's own loggers do so by themselves.

    Args:
        path: The file or folder.
        cluster: Default: the one of this process.

    Returns:
        The path itself for the chief and for one process; for the others the same with `worker1-` before the name.

    Example:
        >>> keras.callbacks.ModelCheckpoint(own_path("model.keras"))
    """
    found = resolve() if cluster is None else cluster
    path = Path(path)
    # In front: behind, it would fall into a suffix (`.weights.h5`) or a format (`{val_loss:.2f}`).
    return path if found.is_chief else path.with_name(f"worker{found.index}-{path.name}")
