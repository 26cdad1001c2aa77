"""The stages of a pipeline: each decides how it is set, says why, and applies itself to the dataset.

arrangement.py decides their order.
"""
