"""A trace of steps and what is in it."""
