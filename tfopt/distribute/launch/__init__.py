"""Starts several workers of one training on this machine: `python -m tfopt.distribute.launch -n 2 train.py`."""
