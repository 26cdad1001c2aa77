"""Counts XLA's compilations by the input signatures that functions run with, and acts on repeated ones."""
