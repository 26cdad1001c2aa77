"""Training on several GPUs and machines: finds the cluster, repairs Keras, watches the workers."""

import lazy_loader

# Loaded on first use: the launcher and the watchdog run without TensorFlow.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
