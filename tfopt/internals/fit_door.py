"""The `fit` that runs in a thread: its callbacks, its data, and what has to be done when it ends, however it ends.

Keras tells callbacks none of it. After `open_door`, a wrapper around `fit` holds it. Of a user's own loop, only the
callback list is known.
"""

import inspect
import math
import threading
import weakref
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.internals.patches import Function, Patch, is_in_place, put
from tfopt.internals.training import TensorFlowTrainer, TFEpochIterator

_running: "ContextVar[RunningFit | None]" = ContextVar("tfopt_fit", default=None)
# By the callbacks' ids: a user's may have no hash, or be equal to another.
_lists: "weakref.WeakValueDictionary[int, keras.callbacks.CallbackList]" = weakref.WeakValueDictionary()
_opening = threading.Lock()
_ITERATOR, _STEP = "_tfopt_iterator", "_tfopt_step"
_BY = "callbacks"


class RunningFit:
    """One call of Keras' `fit`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.ends = ExitStack()
        """What is done when it ends, last first, in its thread."""
        given = arguments.get("callbacks")
        self.callbacks: keras.callbacks.CallbackList | None = None
        """Its callbacks, once Keras has made the list."""
        if isinstance(given, keras.callbacks.CallbackList):
            self.callbacks = given
        self.epochs: Any = None
        """What Keras iterates, once it has made it."""
        self.validation_data = arguments.get("validation_data")
        self.validation_steps = arguments.get("validation_steps")


def running_fit() -> RunningFit | None:
    """The innermost `fit` that runs in this thread; None outside of one, or if it began before `open_door`."""
    return _running.get()


def list_of(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList | None:
    """The last list that a callback was put into, by `fit` or a user's own loop; None if it is in none."""
    found = _lists.get(id(callback))
    return found if found is not None and is_in(callback, found) else None


def is_in(callback: keras.callbacks.Callback, running: keras.callbacks.CallbackList) -> bool:
    """Whether a list holds this very callback."""
    return any(each is callback for each in running.callbacks)


def join_list(callback: keras.callbacks.Callback, running: keras.callbacks.CallbackList) -> None:
    """Adds a callback to a list that others are in already."""
    running.callbacks.append(callback)
    _lists[id(callback)] = running


def current_iterator(epochs: Any) -> Any:
    """The iterator of which Keras took the last batch of an epoch; None if it is gone."""
    found = vars(epochs).get(_ITERATOR)
    return None if found is None else found()


def first_step(epochs: Any) -> int:
    """The step of the epoch, from 0, at which the batch belongs that Keras takes now."""
    return int(vars(epochs).get(_STEP, 0))


def steps_left(epochs: Any) -> float:
    """How many steps Keras takes at most until the epoch ends, this one included; infinite if it does not know."""
    ends = ((epochs.steps_per_epoch, first_step(epochs)), (epochs._num_batches, epochs._steps_seen - 1))
    return min((end - now for end, now in ends if end), default=math.inf)


def open_door() -> None:
    """Wraps Keras' `fit`, for good. Later calls do nothing."""
    patches = (
        Patch(*_inner_fit(), _held, _BY),
        Patch(keras.callbacks.CallbackList, "__init__", _noting_list, _BY),
        Patch(TFEpochIterator, "__init__", _noting_epochs, _BY),
        Patch(TFEpochIterator, "__next__", _noting_iterator, _BY),
    )
    with _opening:
        # Someone whose own patch is older than the door takes the door away with it.
        try:
            put(patch for patch in patches if not is_in_place(patch))
        except AttributeError as error:
            raise UnsupportedError(
                f"Expected a Keras whose fit tfopt's callbacks can follow. Found: Keras {keras.__version__}: {error}. "
                "docs/versions.md lists the versions that they know."
            ) from error


def _inner_fit() -> tuple[Any, str]:
    """Where Keras' wrapper of `fit` has what it calls.

    Not the wrapper itself: `model.fit(callbacks=[…])` finds that before it makes a callback, which opens the door.
    """
    function: Any = TensorFlowTrainer.fit
    while hasattr(getattr(function, "__wrapped__", None), "__wrapped__"):
        function = function.__wrapped__
    inner = getattr(function, "__wrapped__", None)
    for cell in getattr(function, "__closure__", None) or ():
        if inner is not None and inspect.unwrap(cell.cell_contents) is inner:
            return cell, "cell_contents"
    return TensorFlowTrainer, "fit"  # of a Keras whose fit is not wrapped


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
                _lists[id(each)] = callbacks
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
        with suppress(TypeError, LookupError):  # a Keras that yields something else
            if current_iterator(epochs) is not entry[-1]:
                vars(epochs)[_ITERATOR] = weakref.ref(entry[-1])
            vars(epochs)[_STEP] = entry[0]
        return entry

    return take
