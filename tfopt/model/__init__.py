"""What a Keras model is: its checks, state, batches, layers with their shapes, and FLOPs."""
