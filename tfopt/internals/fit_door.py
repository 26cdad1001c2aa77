"""The `fit` that runs in a thread: its callbacks, its data, and what has to be done when it ends, however it ends.

Keras tells callbacks none of it. From `open_door` on, a wrapper around `fit` holds it. Of other loops than `fit` only
their callback lists are known.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import keras

from tfopt.internals.patches import Function, Patch, put
from tfopt.internals.training import TensorFlowTrainer, TFEpochIterator

_running: "ContextVar[RunningFit | None]" = ContextVar("tfopt_fit", default=None)
_lists: "weakref.WeakKeyDictionary[Any, weakref.ref[keras.callbacks.CallbackList]]" = weakref.WeakKeyDictionary()
_ITERATOR = "_tfopt_iterator"


class RunningFit:
    """One call of Keras' `fit`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ends = ExitStack()
        """What is done when it ends, last first, in its thread."""
        self.is_over = False
        given = arguments["callbacks"]
        self.callbacks: keras.callbacks.CallbackList | None = None
        """Its callbacks, once Keras has made the list."""
        if isinstance(given, keras.callbacks.CallbackList):
            self.callbacks = given
        self.epochs: Any = None
        """What Keras iterates, once it has made it."""
        self.validation_data = arguments["validation_data"]
        self.validation_steps = arguments["validation_steps"]


def running_fit() -> RunningFit | None:
    """The innermost `fit` that runs in this thread; None outside of one, or if it began before `open_door`."""
    return _running.get()


def list_of(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList | None:
    """The list that a callback was put into last, of a `fit` or of a loop of the user's own; None if it is in none."""
    found = _lists.get(callback)
    return None if found is None else found()


def join_list(callback: keras.callbacks.Callback, running: keras.callbacks.CallbackList) -> None:
    """Adds a callback to a list that others are in already."""
    running.callbacks.append(callback)
    _lists[callback] = weakref.ref(running)


def current_iterator(epochs: Any) -> Any:
    """The iterator of which Keras took the last batch of an epoch; None if it is gone."""
    found = vars(epochs).get(_ITERATOR)
    return None if found is None else found()


@functools.cache
def open_door() -> None:
    """Wraps Keras' `fit`, for good. Later calls do nothing."""
    by = "callbacks"
    put(
        [
            Patch(TensorFlowTrainer, "fit", _held, by),
            Patch(keras.callbacks.CallbackList, "__init__", _noting_list, by),
            Patch(TFEpochIterator, "__init__", _noting_epochs, by),
            Patch(TFEpochIterator, "__next__", _noting_iterator, by),
        ]
    )


def _held(stock: Function) -> Function:
    signature = inspect.signature(stock)

    def fit(model: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(model, *args, **kwargs)
        except TypeError:
            return stock(model, *args, **kwargs)  # which says what is wrong
        given.apply_defaults()
        running = RunningFit(given.arguments)
        before = _running.set(running)
        try:
            with running.ends:
                return stock(model, *args, **kwargs)
        finally:
            running.is_over = True
            running.callbacks = running.epochs = None
            _running.reset(before)

    return fit


def _noting_list(stock: Function) -> Function:
    def make(callbacks: Any, given: Any = None, *args: Any, **kwargs: Any) -> None:
        running = _running.get()
        if running is not None and running.callbacks is None:
            running.callbacks = callbacks
        for each in keras.tree.flatten(given) if given else ():  # before they are told of their model
            if isinstance(each, keras.callbacks.Callback):
                _lists[each] = weakref.ref(callbacks)
        stock(callbacks, given, *args, **kwargs)

    return make


def _noting_epochs(stock: Function) -> Function:
    def make(epochs: Any, *args: Any, **kwargs: Any) -> None:
        stock(epochs, *args, **kwargs)
        running = _running.get()
        if running is not None and running.epochs is None:
            running.epochs = epochs

    return make


def _noting_iterator(stock: Function) -> Function:
    def take(epochs: Any) -> Any:
        entry = stock(epochs)
        if vars(epochs).get(_ITERATOR, _nothing)() is not entry[-1]:
            vars(epochs)[_ITERATOR] = weakref.ref(entry[-1])
        return entry

    return take


_nothing: Callable[[], Any] = lambda: None  # noqa: E731
