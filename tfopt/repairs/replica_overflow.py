"""D1: an overflow in any replica but the first goes unseen under float16."""

from typing import Any

import tensorflow as tf

from tfopt.repairs.repair import Function, Repair
from tfopt.repairs.replicas import in_several_replicas

_OPTIMIZER = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"


def _everywhere(original: Function) -> Function:
    """Makes a replica's finding that of all of them, as `_tf_apply` takes it to be."""

    def check_finite(self: Any, grads: Any) -> Any:
        finite = original(self, grads)
        if not in_several_replicas():
            return finite
        context = tf.distribute.get_replica_context()
        # All-reduced rather than gathered: it reaches the replicas of other workers, too.
        replicas = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(finite, tf.float32))
        return tf.equal(replicas, float(context.num_replicas_in_sync))

    return check_finite


REPLICA_OVERFLOW = Repair(
    name="replica_overflow",
    defect=(
        "Under a tf.distribute strategy with several replicas, LossScaleOptimizer asks the first replica alone whether "
        "the gradients are finite, before they are summed: an overflow in another one makes the weights NaN and leaves "
        "the loss scale as it was."
    ),
    reference="Keras, LossScaleOptimizer._tf_apply: its comment takes the gradients to be all-reduced already; "
    "no upstream report was found.",
    broken={
        f"{_OPTIMIZER}._tf_apply": frozenset({"f7a5002bd16a56be"}),
        f"{_OPTIMIZER}.check_finite": frozenset({"5386095841a09c2e"}),
    },
    replace={f"{_OPTIMIZER}.check_finite": _everywhere},
    without="Train with mixed_bfloat16, which needs no loss scaling, or on a single replica.",
)
