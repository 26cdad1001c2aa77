"""Delivers a step's logs to callbacks before they are computed; they become numbers when read."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfopt.internals.training import pythonify_logs

_UNREAD = object()
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)

_SECONDS = 1.0  # a progress bar that stops longer looks broken
_STEPS_IN_A_ROW = 3  # a callback that reads on this many steps is assumed to read on all


def is_settled(logs: Any) -> bool:
    """Whether logs are a (nested) dict of tensors, which later steps cannot change."""
    return isinstance(logs, LazyLogs) or (
        isinstance(logs, dict) and all(isinstance(log, _TENSORS) or is_settled(log) for log in logs.values())
    )


class LazyLogs(dict[str, Any]):
    """A step's logs as Keras passes them to callbacks, floats under sorted keys, converted when a value is first read.

    Reading a value waits for the step; length, keys and setting a key do not. However late they are read, the values
    are those of this step.

    Args:
        tensors: What the step returned. Nested dicts are flattened, as in Keras.

    Example:
        >>> logs = LazyLogs({"loss": tf.constant(0.5)})
        >>> list(logs), logs["loss"]
        (['loss'], 0.5)
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Any]):
        super().__init__(dict.fromkeys(_flat_keys(tensors), _UNREAD))
        self._tensors: Mapping[str, Any] | None = dict(tensors)

    @property
    def were_read(self) -> bool:
        """Whether the values have been converted."""
        return self._tensors is None

    def read(self) -> "LazyLogs":
        """Converts the values if they are not converted yet, and returns itself."""
        if self._tensors is not None:
            for key, value in pythonify_logs(self._tensors).items():
                # A callback may have set its own value, or removed the key.
                if dict.get(self, key) is _UNREAD:
                    dict.__setitem__(self, key, value)
            self._tensors = None
        return self

    # Without its own __iter__, dict(logs) and {**logs} would copy the unread values.
    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.read()),)


def _reading(name: str) -> Callable[..., Any]:
    """Returns a method of dict that converts the values first."""
    method = getattr(dict, name)

    def read(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        others = [arg.read() if isinstance(arg, LazyLogs) else arg for arg in args]
        return method(self.read(), *others, **kwargs)

    read.__name__, read.__doc__ = name, method.__doc__
    return read


_READ_METHODS = ("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault", "copy")
for _name in (*_READ_METHODS, "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
    setattr(LazyLogs, _name, _reading(_name))


def _flat_keys(tensors: Mapping[str, Any]) -> Iterator[str]:
    for key, value in sorted(tensors.items()):
        if isinstance(value, dict):
            yield from _flat_keys(value)
        else:
            yield key


class LogDelivery:
    """Delivers logs to the callbacks of one list, each as it needs them.

    - Keras' progress bar gets them every `log_every` steps, on an epoch's first and last step, and after a second.
    - Keras' TensorBoard gets them only on the steps that it writes.
    - A callback with `needs_every_step = True` gets numbers, after the step has ended.
    - All others get `LazyLogs`, which wait only when read.

    A warning names callbacks that make every step wait: known ones (`needs_every_step`, Keras' TerminateOnNaN,
    TensorBoard(update_freq="batch")) on the first step, others once they have done so.

    Args:
        log_every: Steps between updates of the progress bar.
    """

    def __init__(self, log_every: int):
        self._log_every = log_every
        self._shown: float = math.inf  # the batch that the progress bar shows
        self._shown_at = 0.0
        self._reads: dict[int, int] = {}  # by callback: steps in a row on which it was the first to read
        self._named: list[keras.callbacks.Callback] = []
        self._begun = False

    def deliver(self, callbacks: keras.callbacks.CallbackList, hook: str, batch: int, logs: LazyLogs) -> None:
        """Calls a hook, such as "on_train_batch_end", of each callback in order; `batch` numbers the epoch's steps."""
        if not self._begun:
            self._begun = True
            self._warn([callback for callback in callbacks.callbacks if _is_known_to_wait(callback, hook)])
        for callback in callbacks.callbacks:
            kind = type(callback)
            if kind is keras.callbacks.ProgbarLogger and _shows(callback, hook):
                if self._due(batch, callback.target):
                    getattr(callback, hook)(batch, logs=logs)
                else:
                    callback.seen = batch + 1  # becomes its total where the number of steps is unknown
            elif kind is keras.callbacks.TensorBoard:
                getattr(callback, hook)(batch, logs=logs if tf.summary.should_record_summaries() else None)
            else:
                self._call(callback, hook, batch, logs)

    def _call(self, callback: keras.callbacks.Callback, hook: str, batch: int, logs: LazyLogs) -> None:
        if getattr(callback, "needs_every_step", False):
            logs.read()
        unread = not logs.were_read
        getattr(callback, hook)(batch, logs=logs)
        if not unread:
            return
        reads = self._reads.get(id(callback), 0) + 1 if logs.were_read else 0
        self._reads[id(callback)] = reads
        if reads == _STEPS_IN_A_ROW and callback not in self._named:
            self._warn([callback])

    def _due(self, batch: int, target: int | None) -> bool:
        now = time.monotonic()
        first, last = batch <= self._shown, target is not None and batch + 1 >= target
        if first or last or batch - self._shown >= self._log_every or now - self._shown_at >= _SECONDS:
            self._shown, self._shown_at = batch, now
            return True
        return False

    def _warn(self, callbacks: list[keras.callbacks.Callback]) -> None:
        self._named += callbacks
        if callbacks:
            names = " and ".join(dict.fromkeys(type(callback).__name__ for callback in callbacks))
            warnings.warn(
                f"Expected callbacks that leave a step's logs unread, so that the next step need not wait. Found "
                f"{names}, so every step waits for the device: training and logs stay correct, but nothing overlaps. "
                "Read the logs only on some steps, or at the end of the epoch.",
                stacklevel=2,
            )


def _is_known_to_wait(callback: keras.callbacks.Callback, hook: str) -> bool:
    if getattr(callback, "needs_every_step", False):
        return True
    every_batch = isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == 1
    return hook == "on_train_batch_end" and (every_batch or isinstance(callback, keras.callbacks.TerminateOnNaN))


def _shows(bar: Any, hook: str) -> bool:
    """Whether a progress bar would read the logs."""
    return bar.verbose == 1 and not (hook == "on_test_batch_end" and bar._called_in_fit)
