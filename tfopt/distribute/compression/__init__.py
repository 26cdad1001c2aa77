"""Gradients that are summed over the replicas in fewer bytes."""
