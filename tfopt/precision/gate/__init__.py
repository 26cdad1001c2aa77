"""The precision gate: a training step in two precisions (probe), a row per layer (table), verdict and report."""
