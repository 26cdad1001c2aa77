"""D3: each replica clips its gradients before they are summed."""

import inspect
from collections.abc import Iterable
from typing import Any

from keras.src.optimizers.base_optimizer import BaseOptimizer

from tfopt.repairs.repair import Function, Repair, in_several_replicas

_BASE = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_TENSORFLOW = "keras.src.backend.tensorflow.optimizer:TFOptimizer"


def _later(original: Function) -> Function:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        return grads if in_several_replicas() else original(self, grads)

    return _clip_gradients


def _then_clipped(original: Function) -> Function:
    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return clip_sum(self, original(self, grads_and_vars))

    return _all_reduce_sum_gradients


def clip_sum(optimizer: Any, reduced: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Clips gradients summed over the replicas as the optimizer is set; a single replica has clipped already."""
    reduced = list(reduced)
    if not in_several_replicas():
        return reduced
    clipped = inspect.unwrap(BaseOptimizer._clip_gradients)(optimizer, [gradient for gradient, _ in reduced])
    return [(gradient, variable) for gradient, (_, variable) in zip(clipped, reduced, strict=True)]


CLIPPING = Repair(
    name="clipping",
    defect=(
        "Under a tf.distribute strategy with several replicas, clipnorm, global_clipnorm and clipvalue act on each "
        "replica's gradients before they are summed: the update differs from a single device's."
    ),
    reference="Keras, BaseOptimizer._backend_apply_gradients; no upstream report was found.",
    broken={
        f"{_BASE}._backend_apply_gradients": frozenset({"911dfbb4fb47a126"}),
        f"{_BASE}._clip_gradients": frozenset({"2959288b42bbb415"}),
        f"{_TENSORFLOW}._backend_update_step": frozenset({"9117333b6dd23978"}),
        f"{_TENSORFLOW}._all_reduce_sum_gradients": frozenset({"33492b4c7a2a499e"}),
    },
    replace={
        f"{_BASE}._clip_gradients": _later,
        f"{_TENSORFLOW}._all_reduce_sum_gradients": _then_clipped,
    },
    without="Do not clip gradients, or train on a single replica.",
)
