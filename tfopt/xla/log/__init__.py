"""What TensorFlow logs about XLA: asked for, taken out of standard error, and parsed into compilations."""
