"""A small process beside each training process: it notices that a worker was lost and ends those that wait for it.

Nothing here loads TensorFlow.
"""
