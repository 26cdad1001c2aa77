"""Repairs silent defects of Keras and TensorFlow, listed in docs/repairs.md. Nothing is patched on import."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
