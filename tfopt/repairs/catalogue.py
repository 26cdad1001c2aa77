"""All repairs by name: install them, remove them, and get the state of each."""

from dataclasses import dataclass, field
from typing import Any

from tfopt.errors import unknown_name
from tfopt.internals import probing
from tfopt.internals.patches import present
from tfopt.repairs.fit_data import EXTRA_STEP, FAILED_STEPS, NUMPY_SLICES, SHUFFLE_WARNING
from tfopt.repairs.layers import RANDOM_LAYERS, ROUNDED_IDS
from tfopt.repairs.mixed_precision import CLEAR_SESSION, LOSS_SCALING, REPLICA_OVERFLOW, UNSCALED_LOSS
from tfopt.repairs.optimizers import ACCUMULATION, CLIPPING, SCHEDULE_FREE
from tfopt.repairs.recomputation import RECOMPUTATION
from tfopt.repairs.repair import Repair
from tfopt.repairs.replica_losses import REPLICA_LOSSES
from tfopt.repairs.trainer import MULTI_WORKER, REPLICA_EXECUTIONS, SHARED_FILES
from tfopt.repairs.uneven_batches import UNEVEN_BATCHES
from tfopt.text import Shown

REPAIRS = {
    repair.name: repair
    for repair in (
        REPLICA_OVERFLOW,
        LOSS_SCALING,
        UNSCALED_LOSS,
        CLEAR_SESSION,
        ROUNDED_IDS,
        MULTI_WORKER,
        UNEVEN_BATCHES,
        CLIPPING,
        ACCUMULATION,
        REPLICA_EXECUTIONS,
        SHUFFLE_WARNING,
        RECOMPUTATION,
        NUMPY_SLICES,
        RANDOM_LAYERS,
        EXTRA_STEP,
        REPLICA_LOSSES,
        SHARED_FILES,
        FAILED_STEPS,
        SCHEDULE_FREE,
    )
}
"""Every repair, by its name."""

FLOAT16 = ("replica_overflow", "loss_scaling", "unscaled_loss")
"""Repairs that float16 training needs."""

ONE_DEVICE = ("accumulation", "extra_step", "schedule_free")
"""Repairs that training on a single device needs too."""

REPLICAS = (
    "replica_overflow",
    "multi_worker",
    "uneven_batches",
    "clipping",
    "replica_executions",
    "numpy_slices",
    "random_layers",
    "replica_losses",
    *ONE_DEVICE,
)
"""Repairs that training on several replicas needs."""


@dataclass(frozen=True, slots=True, repr=False)
class Status(Shown):
    """State of each defect in this process, and what else tfopt has patched."""

    states: dict[str, str]
    """Name of the repair → "repaired", "broken" (not repaired), "mended" (fixed upstream), "absent" (this Keras lacks
    what has the defect), "unknown" (`install` tries it first) or "refused" (tried in vain)."""

    patches: dict[str, list[str]] = field(default_factory=dict)
    """Functions of Keras and TensorFlow that something else of tfopt has patched: its name → theirs."""

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"states": dict(self.states), "patches": dict(self.patches)}

    def __str__(self) -> str:
        labels = {
            "broken": "broken, not repaired",
            "mended": "fixed upstream",
            "absent": "not in this Keras",
            "unknown": "unknown, not yet tried",
            "refused": "refused: it does not fit",
        }
        width = max(map(len, self.states))
        lines = [
            f"{name:{width}}  {labels.get(state, state):26} {REPAIRS[name].defect}"
            for name, state in self.states.items()
        ]
        return "\n".join([*lines, *(f"{by} has patched {', '.join(names)}" for by, names in self.patches.items())])


def install(*names: str) -> Status:
    """Installs repairs for the rest of the process: all that are named, or none if one is refused.

    You rarely need this: `tfopt.precision`, `tfopt.distribute` and `tfopt.pipelines` install what they need. A second
    call does nothing.

    Args:
        names: Which repairs to install; all of them if omitted.

    Returns:
        The state of every repair.

    Raises:
        ValueError: If a name is not in `REPAIRS`.
        tfopt.errors.UnsupportedError: If a function that it would replace is not known, and the repair does not fit it.

    Example:
        >>> print(tfopt.repairs.install("clear_session"))
        replica_overflow  broken, not repaired       Under a tf.distribute strategy with several replicas, …
    """
    chosen = _chosen(names)
    try_out(*names)
    for repair in chosen:
        repair.applies()
    for repair in chosen:
        repair.install()
    return status()


def try_out(*names: str) -> None:
    """Probes, in one process, those of these repairs that meet functions which tfopt does not know."""
    probing.verdicts([repair for repair in _chosen(names) if repair.standing() == "unknown"])


def remove(*names: str) -> Status:
    """Restores the original functions, of all repairs if no names are given; returns the state of every repair.

    A model compiled while `loss_scaling` was installed keeps its optimizer.

    Raises:
        ValueError: If a name is not in `REPAIRS`.
        tfopt.errors.UnsupportedError: If others have patched a function again since.

    Example:
        >>> tfopt.repairs.remove("clear_session").states["clear_session"]
        'broken'
    """
    for repair in _chosen(names):
        repair.remove()
    return status()


def status() -> Status:
    """Returns the state of every repair, and what else is patched. Changes nothing.

    Example:
        >>> tfopt.repairs.status().states["clear_session"]
        'broken'
    """
    patches: dict[str, list[str]] = {}
    for patch in present():
        if patch.by not in REPAIRS:
            patches.setdefault(patch.by, []).append(str(patch))
    return Status({name: _state(repair) for name, repair in REPAIRS.items()}, patches)


def _chosen(names: tuple[str, ...]) -> list[Repair]:
    for name in names:
        if name not in list(REPAIRS):  # a list, so that unhashable values are refused too
            raise unknown_name("repair", name, REPAIRS)
    return [repair for name, repair in REPAIRS.items() if name in names or not names]


def _state(repair: Repair) -> str:
    if repair.installed:
        return "repaired"
    standing = repair.standing()
    if standing in ("absent", "unknown", "refused"):
        return standing
    return "broken" if repair.applies() else "mended"
