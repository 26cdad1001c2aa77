"""D1: under float16, an overflow in any replica but the first goes unnoticed."""

from typing import Any

import tensorflow as tf

from tfopt.repairs.repair import Function, Repair, in_several_replicas

_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"


def _everywhere(original: Function) -> Function:
    """Makes the check cover all replicas, as `_tf_apply` assumes."""

    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not in_several_replicas():
            return finite
        context = tf.distribute.get_replica_context()
        # All-reduced rather than gathered, to reach the replicas of other workers too.
        replicas = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(finite, tf.float32))
        return tf.equal(replicas, float(context.num_replicas_in_sync))

    return check_finite


REPLICA_OVERFLOW = Repair(
    name="replica_overflow",
    defect=(
        "Under a tf.distribute strategy with several replicas, LossScaleOptimizer checks only the first replica's "
        "gradients, before they are summed: an overflow in another replica makes the weights NaN and leaves the loss "
        "scale as it was."
    ),
    reference="Keras, LossScaleOptimizer._tf_apply: its comment assumes all-reduced gradients; "
    "no upstream report was found.",
    broken={
        f"{_OPTIMIZER}._tf_apply": frozenset({"f7a5002bd16a56be"}),
        f"{_OPTIMIZER}.check_finite": frozenset({"5386095841a09c2e"}),
    },
    replace={f"{_OPTIMIZER}.check_finite": _everywhere},
    without="Train with mixed_bfloat16, which needs no loss scaling, or on a single replica.",
)
