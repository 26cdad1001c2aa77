"""What a callback needs to know about the running `fit` and Keras does not pass on."""

import contextlib
import math
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.shared.fit_watch import end_with
from tfopt.causes.between_gpus import Replicas
from tfopt.errors import unknown_name
from tfopt.internals.fit_door import current_iterator, is_in, list_of, open_door, running_fit

_SHOWN = "_tfopt_shown"  # an attribute of progress bars: of each of tfopt's keys, whether they print it
RESUMED = "_tfopt_resumed"
"""An attribute of models: the steps before the epoch in which TrainingCheckpoint resumes, until that has begun."""
_LOGGERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)


class Callback(keras.callbacks.Callback):
    """A callback that knows the `fit` it runs in. Making the first one wraps Keras' `fit`."""

    acts_every = 0
    """Does nothing between the steps of a launch (`tfopt.fit.overlap`) but to read their logs."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes one."""
        open_door()  # not in __init__, which copies do without
        return super().__new__(cls)


def running_list(callback: keras.callbacks.Callback) -> keras.callbacks.CallbackList | None:
    """Returns the callback list that a callback is in. Keras tells no callback about the others."""
    running = running_fit()
    found = None if running is None else running.callbacks
    return found if found is not None and is_in(callback, found) else list_of(callback)


def running_iterator() -> Any:
    """Returns the iterator of which the running `fit` trains a batch; None outside of a `fit`."""
    running = running_fit()
    return None if running is None or running.epochs is None else current_iterator(running.epochs)


def warn_of_earlier_loggers(callback: keras.callbacks.Callback) -> None:
    """Warns about Keras loggers that precede `callback` in fit's list and so miss its keys.

    Call it from `on_train_begin`. A callback that `find_source` added follows all loggers on purpose.
    """
    if getattr(callback, "added_for_another", False):
        return
    running = running_list(callback)
    for earlier in takewhile(lambda other: other is not callback, running.callbacks if running else ()):
        if isinstance(earlier, _LOGGERS):
            warnings.warn(
                f"Expected {type(callback).__name__} before {type(earlier).__name__} in callbacks=[…]. Found it after, "
                f"where {type(earlier).__name__} misses its keys. Put {type(callback).__name__} first.",
                stacklevel=2,
            )


class _Rounded(float):
    """A figure as the progress bar prints it: four significant digits, where Keras prints four decimals."""

    def __truediv__(self, count: float) -> "_Rounded":
        return _Rounded(float(self) / count)

    def __format__(self, spec: str) -> str:
        return f"{float(self):.0f}" if abs(self) >= 1000 else f"{float(self):.4g}"


def log_epoch(
    callback: keras.callbacks.Callback,
    logs: dict[str, Any],
    figures: Mapping[str, float],
    show: Collection[str] | None,
) -> None:
    """Adds an epoch's figures to the logs, of which fit's progress bar prints only those in `show`. None: all.

    Call it from `on_epoch_end`. History and loggers get all of them.
    """
    logs.update(figures)
    bar = getattr(running_list(callback), "_progbar", None)
    if bar is None:
        return
    if not hasattr(bar, _SHOWN):
        stock, reference = type(bar)._finalize_progbar, weakref.ref(bar)

        def finalize(logs: Mapping[str, Any] | None) -> None:
            bar = reference()
            if bar is not None:
                shown = getattr(bar, _SHOWN)
                kept = {key: value for key, value in (logs or {}).items() if shown.get(key, True)}
                stock(bar, {key: _Rounded(value) if key in shown else value for key, value in kept.items()})

        setattr(bar, _SHOWN, {})
        bar._finalize_progbar = finalize
    getattr(bar, _SHOWN).update((key, show is None or key in show) for key in figures)


def check_shown(show: Collection[str] | None, logged: Collection[str]) -> Collection[str] | None:
    """Returns the keys to print, checked."""
    if isinstance(show, str):
        raise TypeError(f"Expected `show` to be a list of keys, or None for all. Received: {show!r}. Pass [{show!r}].")
    for key in show or ():
        if key not in logged:
            raise unknown_name("key of `show`", key, logged)
    return show


def end_with_fit(callback: keras.callbacks.Callback, end: Callable[[], object], *, at_exit: bool = True) -> None:
    """Calls `end` once the running fit is over, even if an exception ends it and `on_train_end` is never called.

    In a loop of the user's own it is called when the callback's list is collected. Also on SIGTERM if nobody else
    handles it, and when Python exits. Call this from `on_train_begin`.

    Args:
        callback: In a loop without a list, its lifetime stands in for the loop's.
        end: Must not hold the callback or its list, or neither could be collected in a loop of the user's own. Called
            in any thread.
        at_exit: Whether to call it when the process ends during the fit.
    """
    running = running_fit()
    ending = end_with(running or running_list(callback) or callback, end, at_exit=at_exit)
    if running is not None:
        running.ends.callback(ending)


def steps_trained(model: keras.Model) -> int:
    """Returns how many steps the model's optimizer has taken, or 0 if it cannot tell. Reads a variable.

    After `TrainingCheckpoint` and `keras.callbacks.BackupAndRestore` this includes the steps of earlier runs.
    """
    if hasattr(model, RESUMED):  # the optimizer's are restored once all callbacks began the epoch
        return int(getattr(model, RESUMED))
    optimizer = getattr(model, "optimizer", None)
    # Not `.iterations`, which counts updates: with gradient accumulation several steps make one update.
    counter = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_iterations", None)
    return int(counter.numpy()) if isinstance(counter, keras.Variable) else 0


def most_steps(callback: keras.callbacks.Callback) -> int:
    """Returns how many steps an epoch has, or `sys.maxsize` if unknown: a bound for the count that hooks are given.

    With `steps_per_execution`, Keras counts the last execution as whole, even if the data ends within it.
    """
    return (callback.params or {}).get("steps") or sys.maxsize


def count_examples(model: keras.Model) -> float:
    """Returns the examples of all replicas since Keras' loss tracker was reset; 0 if it counts none.

    Blocks until the launched steps are done.
    """
    tracker = getattr(model, "_loss_tracker", None)
    if tracker is None:
        return 0.0
    count = tracker.count.value  # the mean's weight: Keras weights each batch's loss with its examples
    parts = getattr(count, "values", None)
    if parts is None:
        return float(count.numpy())
    # One part per replica. Reading them as one waits for every worker, and not all may have this callback.
    return sum(float(part.numpy()) for part in parts) * model.distribute_strategy.num_replicas_in_sync / len(parts)


class EpochExamples:
    """Counts an epoch's examples without waiting for the device in the middle of the epoch.

    It reads Keras' loss tracker after the training's first step, which has blocked anyway, and after each epoch's last
    step, before validation resets the tracker. If another callback reset it during the epoch (by `evaluate`), every
    batch counts as large as the first. With a `batch_size` nothing is read, and every batch counts as that large.
    """

    def __init__(self, model: keras.Model, batch_size: float | None = None):
        self._model = model
        self._given = batch_size is not None
        self.batch_size = batch_size
        """Examples per step; None before the first step, 0 if Keras counts none."""
        self._last_step = math.inf
        self.start(None)

    def start(self, steps: int | None) -> None:
        """Begins an epoch of `steps` steps, None if unknown."""
        self._last_step = math.inf if steps is None else steps - 1
        self._counted: float | None = None
        self.due: float = math.inf if self._given else 0 if self.batch_size is None else self._last_step
        """The step of the epoch, from 0, after which `look` must be called."""

    def look(self, step: int) -> None:
        """Reads the count after a step of the epoch."""
        self._counted = count_examples(self._model)
        if self.batch_size is None:
            self.batch_size = self._counted / min(step + 1, self._last_step + 1)
        self.due = self._last_step
        if step < self._last_step:
            self._counted = None

    def look_before_validation(self, steps_done: int) -> None:
        """Reads the count if the epoch's last step was not known: call it from `on_test_begin`."""
        if self._counted is None and steps_done and not self._given:
            self._counted = count_examples(self._model)

    def examples(self, steps_done: int) -> float | None:
        """Returns the examples of an epoch of `steps_done` steps; None if Keras counts none."""
        if not self.batch_size or not steps_done:
            return None
        if self._given:
            return steps_done * self.batch_size
        counted = count_examples(self._model) if self._counted is None else self._counted
        # All batches have one size, the last may be smaller, and the last execution may lack some: any other count is
        # not this epoch's.
        whole = steps_done * self.batch_size
        least = whole - self.batch_size * getattr(self._model, "steps_per_execution", 1)
        return counted if least < counted <= whole else whole


def replicas_of(model: keras.Model | None) -> Replicas | None:
    """Returns how the model is spread over the devices that TensorFlow may use; None without a model."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None:
        return None
    everywhere, name = strategy.num_replicas_in_sync, type(strategy).__name__
    default = name.startswith("_Default")
    here = 1
    with contextlib.suppress(AttributeError, RuntimeError):  # strategies that do not tell
        here = 1 if default else len(strategy.extended.worker_devices)
    gpus = (device.name.rpartition(":")[2] for device in tf.config.get_visible_devices("GPU"))
    visible = frozenset(int(index) for index in gpus)
    return Replicas(min(here, everywhere), everywhere, None if default else name, visible or None)
