"""XLA for a Keras model: decide whether it pays, explain what keeps it off, switch it, and watch it compile."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
