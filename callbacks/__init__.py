"""Callbacks for `model.fit(callbacks=[...])`. Put them before Keras' own loggers, which otherwise miss their keys."""

import lazy_loader

# One callback per file; private parts too long for it stand in a file or folder named for it, what several need in
# `shared`.
# Loaded when asked for: all of them take a tenth of a second, and a training uses a few.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
