"""All repairs by name: put in place, taken back, and what state each is in."""

from dataclasses import dataclass
from typing import Any

from tfopt.errors import UnsupportedError, unknown_name
from tfopt.repairs.accumulation import ACCUMULATION
from tfopt.repairs.clear_session import CLEAR_SESSION
from tfopt.repairs.clipping import CLIPPING
from tfopt.repairs.loss_scaling import LOSS_SCALING
from tfopt.repairs.multi_worker import MULTI_WORKER
from tfopt.repairs.repair import Repair
from tfopt.repairs.replica_executions import REPLICA_EXECUTIONS
from tfopt.repairs.replica_overflow import REPLICA_OVERFLOW
from tfopt.repairs.uneven_batches import UNEVEN_BATCHES
from tfopt.repairs.unscaled_loss import UNSCALED_LOSS

_ALL = (
    REPLICA_OVERFLOW,
    LOSS_SCALING,
    UNSCALED_LOSS,
    CLEAR_SESSION,
    MULTI_WORKER,
    UNEVEN_BATCHES,
    CLIPPING,
    ACCUMULATION,
    REPLICA_EXECUTIONS,
)

REPAIRS = {repair.name: repair for repair in _ALL}
"""Every repair, by its name."""

FLOAT16 = ("replica_overflow", "loss_scaling", "unscaled_loss")
"""The repairs that training in float16 needs."""

REPLICAS = ("replica_overflow", "multi_worker", "uneven_batches", "clipping", "accumulation", "replica_executions")
"""The repairs that training on several replicas needs."""


@dataclass(frozen=True, slots=True)
class Status:
    """What state each defect is in, in this process.

    Attributes:
        states: Repair to "repaired", "broken" (and not repaired), "mended" (upstream) or "unknown".
    """

    states: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return dict(self.states)

    def __str__(self) -> str:
        words = {"broken": "broken, not repaired", "mended": "mended upstream", "unknown": "unknown: tfopt refuses it"}
        width = max(map(len, self.states))
        return "\n".join(
            f"{name:{width}}  {words.get(state, state):26} {REPAIRS[name].defect}"
            for name, state in self.states.items()
        )


def install(*names: str) -> Status:
    """Puts repairs in place for the rest of the process, all or none of them; again, it does nothing.

    The policies of `tfopt.precision` install what they need.

    Args:
        names: Which. Without names: every one.

    Returns:
        The state of every repair.

    Raises:
        ValueError: A name is none of `REPAIRS`.
        tfopt.errors.UnsupportedError: The installed Keras or TensorFlow has a function that tfopt does not know.

    Example:
        >>> print(tfopt.repairs.install("clear_session"))
        replica_overflow  broken, not repaired       Under a tf.distribute strategy with several replicas, …
    """
    chosen = _chosen(names)
    for repair in chosen:
        repair.applies()
    for repair in chosen:
        repair.install()
    return status()


def remove(*names: str) -> Status:
    """Puts the original functions back.

    A model compiled while `loss_scaling` was in place keeps its optimizer.

    Args:
        names: Which repairs to take back. Without names: every one.

    Returns:
        The state of every repair.

    Raises:
        ValueError: A name is none of `REPAIRS`.
        tfopt.errors.UnsupportedError: Somebody else has patched the function since.

    Example:
        >>> tfopt.repairs.remove("clear_session").states["clear_session"]
        'broken'
    """
    for repair in sorted(_chosen(names), key=lambda repair: repair.turn, reverse=True):
        repair.remove()
    return status()


def status() -> Status:
    """Returns the state of every repair, without changing any.

    Example:
        >>> tfopt.repairs.status().states["clear_session"]
        'broken'
    """
    return Status({name: _state(repair) for name, repair in REPAIRS.items()})


def _chosen(names: tuple[str, ...]) -> list[Repair]:
    for name in names:
        if name not in list(REPAIRS):  # whatever was passed, also what has no hash
            raise unknown_name("repair", name, REPAIRS)
    return [repair for name, repair in REPAIRS.items() if name in names or not names]


def _state(repair: Repair) -> str:
    if repair.installed:
        return "repaired"
    try:
        return "broken" if repair.applies() else "mended"
    except UnsupportedError:
        return "unknown"
