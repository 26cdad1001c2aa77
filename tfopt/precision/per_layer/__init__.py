"""Dtype policies per layer: what each layer costs, the search for the fastest assignment, and its measurement."""
