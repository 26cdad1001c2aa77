"""Training on several GPUs and several machines: resolved, repaired, watched."""

import lazy_loader

# On first use: the launcher and the watchdog do without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
