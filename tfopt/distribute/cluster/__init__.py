"""Finds the workers that train together, and which one this process is. Nothing here loads TensorFlow."""
