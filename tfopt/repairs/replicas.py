"""Where a repair asks whether it is among several replicas."""

import tensorflow as tf


def in_several_replicas() -> bool:
    """Tells whether this is the function of one replica among several, under a tf.distribute strategy."""
    context = tf.distribute.get_replica_context()
    return context is not None and context.num_replicas_in_sync > 1
