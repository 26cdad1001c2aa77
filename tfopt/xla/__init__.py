"""XLA for a Keras model: decided by measurement, explained, watched and switched.

`decide` measures whether it pays; `explain` says why it cannot run; `set_jit` and `jit` switch it; `watch` counts
compilations; `flags` and `persistent_cache` set up XLA itself.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
