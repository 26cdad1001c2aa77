"""Repairs silent defects of Keras and TensorFlow, one per file. Nothing is patched on import. See docs/repairs.md."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
