"""A callback sees only the log keys that callbacks before it in the list have added."""

import inspect
import warnings
from itertools import takewhile

import keras

_LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def warn_of_earlier_loggers(callback: keras.callbacks.Callback) -> None:
    """Warns if Keras loggers stand before `callback` in fit's list. Call it from the callback's `on_train_begin`."""
    running = running_list()
    for earlier in takewhile(lambda other: other is not callback, running.callbacks if running else ()):
        if isinstance(earlier, _LOGGERS):
            warnings.warn(
                f"Expected {type(callback).__name__} before {type(earlier).__name__} in callbacks=[…]. Found it after, "
                f"where {type(earlier).__name__} misses its keys. Put {type(callback).__name__} first.",
                stacklevel=2,
            )


def running_list() -> keras.callbacks.CallbackList | None:
    """The list of callbacks of the `fit` that the caller is called by. Keras tells no callback of the others."""
    own = inspect.currentframe()
    # Not its own frame: asking that for its variables, of which it is one, would keep fit's frames in a cycle.
    frame = own and own.f_back
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back
    return None
