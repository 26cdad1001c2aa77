"""Checkpoints of a training that exist whole or not at all, and hold nothing twice."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
