"""D9: a custom train_step that forgets to scale the loss."""

import weakref
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.repairs.repair import Function, Repair

_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"

_scaled: weakref.WeakSet[keras.optimizers.LossScaleOptimizer] = weakref.WeakSet()


def _noting_scale_loss(original: Function) -> Function:
    def scale_loss(self: Any, loss: Any) -> Any:
        _scaled.add(self)
        return original(self, loss)

    return scale_loss


def _asking_apply(original: Function) -> Function:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if self not in _scaled:
            raise UnsupportedError(
                "Expected the loss to be scaled before its gradients are taken, because LossScaleOptimizer divides "
                f"them by the scale ({self.initial_scale:g} at first). Found: scale_loss was never called on "
                f"{self.name!r}, so the weights would hardly move. In train_step, inside the tf.GradientTape and after "
                "the loss, write `loss = self.optimizer.scale_loss(loss)`."
            )
        return original(self, grads, trainable_variables)

    return apply


UNSCALED_LOSS = Repair(
    name="unscaled_loss",
    defect=(
        "LossScaleOptimizer divides the gradients by the loss scale even if a custom train_step never multiplied the "
        "loss by it: the weights hardly move, without any error."
    ),
    reference="Keras, LossScaleOptimizer.apply; no upstream report was found.",
    broken={
        f"{_OPTIMIZER}.apply": frozenset({"d9ab44f3671faadc"}),
        f"{_OPTIMIZER}.scale_loss": frozenset({"78d5d041ca7676f4"}),
    },
    replace={f"{_OPTIMIZER}.apply": _asking_apply, f"{_OPTIMIZER}.scale_loss": _noting_scale_loss},
    without="Make sure that a custom train_step calls `self.optimizer.scale_loss(loss)` inside the tape.",
)
