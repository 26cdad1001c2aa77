"""Fast paths that Keras on TensorFlow lacks, installed layer by layer and removed by `undo`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
