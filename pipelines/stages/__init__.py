"""The stages of a pipeline: each decides how it is set, says why, and applies itself to the dataset.

plan.py decides their order.
"""
