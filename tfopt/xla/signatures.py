"""Input signatures of jit-compiled functions: what can be counted where XLA's own reports are not to be had."""

import functools
import threading
import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from tfopt.xla.compilation import Compilation, History

_PLAIN = (bool, int, float, str, type(None))


class SignatureListener:
    """Notes each new signature that a `tf.function(jit_compile=True)` is called with, while it is resumed.

    A compiled step that takes its batches from a tf.data iterator inside another function, as under Keras `fit`, is
    seen once, while it is traced: the shapes of its later batches never pass Python.
    """

    source = "signatures"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on = 0
        self._history = History()
        self._seen: weakref.WeakKeyDictionary[Any, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()
        self._original = polymorphic_function.Function.__call__
        self.events: list[Compilation] = []

    def open(self) -> None:
        """Nothing to prepare."""

    def resume(self) -> None:
        """Notes signatures from now on."""
        with self._lock:
            self._on += 1
            if self._on == 1:
                self._original = polymorphic_function.Function.__call__
                polymorphic_function.Function.__call__ = self._noting(self._original)

    def pause(self) -> None:
        """Notes none from now on, unless another watch does."""
        with self._lock:
            self._on -= 1
            if not self._on:
                polymorphic_function.Function.__call__ = self._original

    def sync(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to end."""

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(function, *args, **kwargs)
            if function._jit_compile:
                self._note(function, args, kwargs)
            return result

        return call

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        signature = tuple(_text(value) for value in tf.nest.flatten((args, kwargs)))
        with self._lock:
            seen = self._seen.setdefault(function, set())
            if signature in seen:
                return
            seen.add(signature)
            name = getattr(function.python_function, "__name__", "function")
            inputs = dict(enumerate(signature))
            self.events.append(self._history.add(name, name, None, inputs, owner=id(function)))


def _text(value: Any) -> str:
    """Shape and dtype of a tensor, a plain value as it is, of anything else the type: what a trace is made for."""
    if isinstance(value, _PLAIN):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return type(value).__name__
    known = getattr(shape, "rank", 0) is not None
    return f"{tf.as_dtype(dtype).name} {tuple(shape) if known else '(of unknown rank)'}"
