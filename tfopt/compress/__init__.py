"""Cheaper models: what layers cost, cheaper forms, pruning, integers, and students that learn from a teacher."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
