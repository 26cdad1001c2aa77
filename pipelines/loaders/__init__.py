"""Loaders of other frameworks as sources."""
