"""A small process beside each training process, which ends it if another worker is lost. Never loads TensorFlow."""
