"""Makes TensorFlow log XLA's compilations, takes the lines out of standard error, and parses them."""
