"""A pipeline whose work runs on the workers of a tf.data service: one file for each part of it."""
