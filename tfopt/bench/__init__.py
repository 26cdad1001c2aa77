"""`tfopt-bench`: what each optimisation does to a real training on this machine."""
