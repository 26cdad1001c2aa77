"""Callbacks that take readings, and the callbacks that use them.

A callback that uses readings takes them from the source in fit's list, wherever it stands there, or adds one. So each
reading is taken once, whoever uses it.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras

from tfopt.callbacks.order import running_list
from tfopt.warn import warn_once

Source = TypeVar("Source", bound=keras.callbacks.Callback)


def source(kind: type[Source], user: keras.callbacks.Callback) -> Source:
    """Returns the source of a kind in the fit that runs. Call it from the user's `on_train_begin`.

    One that is added stands at the end of fit's list, behind Keras' history: its keys show up in no history.

    Args:
        kind: Of which callback. It must be made without arguments.
        user: The callback that asks.
    """
    running = running_list()
    for callback in running.callbacks if running else ():
        if isinstance(callback, kind):
            return callback
    added = kind()
    added.added_for_another = True  # nobody waits for its keys
    if running is not None:
        added.set_params(running.params)
        added.set_model(user.model)
        # Keras calls on_train_begin of a list's callbacks in a loop over it, which comes to this one too.
        running.callbacks.append(added)
    return added


class Listeners:
    """The methods that a source tells of its readings. It does not keep their callbacks alive.

    One that raises is reported once; the others are told all the same, and the training goes on.

    Example:
        >>> listeners = Listeners()
        >>> listeners.add(report.take)
        >>> listeners(row)  # calls report.take(row)
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[Callable[..., Any]], ...] = ()

    def add(self, method: Callable[..., Any]) -> None:
        """Tells a bound method from now on, once however often it is added."""
        self.remove(method)
        self._methods = (*self._methods, weakref.WeakMethod(method))

    def remove(self, method: Callable[..., Any]) -> None:
        """Tells it no longer; does nothing where it was not told."""
        # Replaced, not changed: another thread may be in the middle of telling.
        self._methods = tuple(other for other in self._methods if other() not in (None, method))

    def __call__(self, *readings: Any) -> None:
        """Tells each method, in the order in which they were added."""
        for reference in self._methods:
            method = reference()
            if method is None:
                continue
            try:
                method(*readings)
            except Exception as error:  # noqa: BLE001  what looks on must not end a training
                name = method.__qualname__
                text = f"Expected {name} to take a reading. Found: {error!r}. The training goes on without it."
                warn_once(f"listener {name} {type(error).__name__}", text, error=error)

    def __reduce__(self) -> tuple[Any, ...]:
        return Listeners, ()  # a copy of a source has listeners of its own
