"""Input prepared by the workers of a tf.data service: the training process' side of it."""
