"""Looks at a few elements before anything is built: do the functions trace and run, what do they draw, how large is it?

`inspect_source` in facts.py is the way in; what it learns decides the stages.
"""
