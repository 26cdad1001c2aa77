"""Runs as text: in a terminal, on a page, and a folder of them as one document."""
