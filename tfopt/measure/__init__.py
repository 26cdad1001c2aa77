"""How long a training step takes: real steps, raw samples with an interval, and an unchanged model."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
