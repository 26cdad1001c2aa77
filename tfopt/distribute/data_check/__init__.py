"""Finds data of which several workers would train on a part, or on some examples twice."""
