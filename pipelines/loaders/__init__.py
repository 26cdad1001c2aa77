"""Loaders of other frameworks, and generator functions, as sources."""
