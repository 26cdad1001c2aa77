"""A callback sees only the log keys that callbacks before it in the list have added."""

import warnings
from itertools import takewhile

import keras

from tfopt.callbacks.callers import variable_of_a_caller

_LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


def warn_of_earlier_loggers(callback: keras.callbacks.Callback) -> None:
    """Warns if Keras loggers stand before `callback` in fit's list. Call it from the callback's `on_train_begin`.

    One that `tfopt.callbacks.sources` has added stands behind all of them, and rightly.
    """
    if getattr(callback, "added_for_another", False):
        return
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
    return variable_of_a_caller("self", keras.callbacks.CallbackList)
