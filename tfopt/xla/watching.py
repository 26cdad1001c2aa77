"""Counts XLA's compilations while a block of code runs."""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from tfopt import checks
from tfopt.errors import UnsupportedError
from tfopt.internals.graphs import Function
from tfopt.internals.patches import Patch, put, undo
from tfopt.text import Shown
from tfopt.xla.log.compilations import Compilation, History, LogParser
from tfopt.xla.log.framework import Verbosity
from tfopt.xla.log.stderr_tap import PATIENCE_SECONDS, StderrTap
from tfopt.xla.recompilation import Reactor, check_stance, reacting

_SHOWN = 10
_PLAIN = (bool, int, float, str, type(None))


@contextmanager
def watch(*, on_recompile: str | None = None, limit: int = 4) -> Iterator["Compilations"]:
    """Counts XLA's compilations in the block, with the duration and cause of each, and can act on repeated ones.

    Use it when training stalls now and then: XLA compiles every new input shape, which takes seconds or minutes, and
    neither Keras nor `experimental_get_tracing_count()` shows it. It adds nothing to a step. Blocks can be nested and
    see the compilations of all threads.

    Inside the block, standard error (file descriptor 2) passes through a process that removes XLA's lines. All else is
    passed on unchanged, even after a crash. Outside the block, nothing is logged.

    Without standard error, or with a TensorFlow whose log cannot be read, it counts the input signatures of calls to
    functions with `jit_compile=True` instead, and `str()` says so. That undercounts under `fit`, whose batches never
    pass through Python.

    Args:
        on_recompile: What to do once a function has been compiled more than `limit` times in the block. "warn": warn
            once. "error": raise. "eager": warn, and run the Keras model that the step belongs to without XLA from its
            next step on, as `set_jit(model, False)` does; a function outside Keras models keeps XLA. None: only count.
            It acts in the thread of the block, when the call of a `tf.function`, such as a step of `fit`, has ended.
            By then the compilation that exceeded the limit has happened: TensorFlow reports it when it is done.
        limit: Compilations allowed for one function. Training, evaluation and prediction are counted separately, and
            a smaller last batch takes one more.

    Raises:
        ValueError: If `on_recompile` is none of the above, or `limit` is below 1.
        TypeError: If `limit` is not an integer.
        tfopt.errors.TfoptError: At the end of the step in which the limit was exceeded, with on_recompile="error".

    Yields:
        The `Compilations`, readable inside the block and after it.

    Example:
        >>> with tfopt.xla.watch() as compilations:
        ...     model.fit(dataset)
        >>> print(compilations)
        2 XLA compilations, 3.36 s
          training step: 1.91 s, its first compilation here
          training step: 1.45 s, x: (32, 8, 8, 1) → (17, 8, 8, 1), y: (32,) → (17,)
    """
    if on_recompile is not None:
        check_stance(on_recompile)
    checks.integer("limit", limit, "A training whose last batch is smaller needs 2.", least=1)
    watching = Watch()
    try:
        with reacting(Reactor(watching.compilations, on_recompile, limit)) if on_recompile else nullcontext():
            yield watching.compilations
    finally:
        watching.stop()


class Compilations(Shown):
    """What XLA compiled during a watch."""

    source: str
    """What is counted: "compilations" as XLA reports them, or "signatures" if its reports cannot be read."""
    reason: str | None
    """Why they cannot be read; None if they can."""

    def __init__(self, listener: "_CompilerListener | _SignatureListener", reason: str | None):
        listener.sync()
        self.source = listener.source
        self.reason = reason
        self._listener = listener
        self._start = len(listener.events)
        self._end: int | None = None

    @property
    def events(self) -> tuple[Compilation, ...]:
        """Compilations in the order they ended."""
        if self._end is None:
            self._listener.sync()
        return tuple(self._listener.events[self._start : self._end])

    @property
    def changed(self) -> bool:
        """Whether `events` may hold more than at the last look. Takes a microsecond; a report may be late."""
        return self._end is None and self._listener.has_news()

    @property
    def count(self) -> int:
        """Number of compilations."""
        return len(self.events)

    @property
    def seconds(self) -> float | None:
        """Total compile time; None if only signatures were counted."""
        return sum(event.seconds or 0.0 for event in self.events) if self.source == "compilations" else None

    def end(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Stops counting."""
        if self._end is None:
            self._listener.sync(patience_seconds)
            self._end = len(self._listener.events)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        events = self.events
        plain = {"source": self.source, "reason": self.reason, "count": len(events), "seconds": self.seconds}
        return plain | {"events": [event.to_dict() for event in events]}

    def __str__(self) -> str:
        events = self.events
        plural = "" if len(events) == 1 else "s"
        if self.source == "compilations":
            head = f"{len(events)} XLA compilation{plural}, {self.seconds:.3g} s"
        else:
            head = f"{len(events)} input signature{plural} of functions with jit_compile=True, without the batches "
            head += f"that fit takes from a dataset; XLA's compilations could not be counted. {self.reason}"
        more = [f"  … and {len(events) - _SHOWN} more"] if len(events) > _SHOWN else []
        return "\n".join([head, *(f"  {event}" for event in events[:_SHOWN]), *more])


class Watch:
    """`watch()` without a block: it counts until `stop` is called."""

    compilations: "Compilations"
    """What has been compiled meanwhile."""

    def __init__(self) -> None:
        reason = None
        self._listener: _CompilerListener | _SignatureListener = _COMPILER
        try:
            _COMPILER.open()
        except UnsupportedError as error:
            self._listener, reason = _SIGNATURES, str(error)
            _SIGNATURES.open()
        self._stopped = False
        self.compilations = Compilations(self._listener, reason)

    def stop(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Ends the watch; waits so long for reports that are late. A second call does nothing."""
        if not self._stopped:
            self._stopped = True
            try:
                self.compilations.end(patience_seconds)
            finally:
                self._listener.close()


class _CompilerListener:
    """This process's tap on standard error, shared by all open watches."""

    source = "compilations"

    def __init__(self) -> None:
        self._parser = LogParser(History())
        self._tap: StderrTap | None = None
        self._verbosity: Verbosity | None = None
        self.events: list[Compilation] = []
        self._lock = threading.RLock()
        self._watches = 0

    def abandon(self) -> None:
        """Restores standard error and the log settings in a forked child."""
        self._lock = threading.RLock()  # a thread missing in the child may have held the old one
        if self._tap and self._verbosity:
            self._verbosity.down()
            self._tap.abandon()
            self._tap = None

    def open(self) -> None:
        with self._lock:
            if not self._tap:
                self._verbosity = Verbosity()
                self._tap = StderrTap(hidden=self._verbosity.hidden, copy=self._verbosity.asked)
                self._tap.on()
                self._verbosity.up()
            self._watches += 1

    def sync(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Reads the log so far."""
        with self._lock:
            if self._tap:
                self.events += self._parser.parse(self._tap.lines(patience_seconds))

    def has_news(self) -> bool:
        """Whether the log may have more."""
        tap = self._tap
        return tap is not None and tap.has_lines()

    def close(self) -> None:
        with self._lock:
            self._watches -= 1
            if self._watches == 0 and self._tap and self._verbosity:
                tap, self._tap = self._tap, None
                self._verbosity.down()
                tap.close()


class _SignatureListener:
    """Records each new input signature of a `tf.function(jit_compile=True)`.

    Keras' `fit` calls its compiled step inside another function that reads the tf.data iterator. Python sees that step
    only while it is traced, and no shapes of later batches.
    """

    source = "signatures"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches = 0
        self._history = History()
        self._seen: weakref.WeakKeyDictionary[Any, set[tuple[str, ...]]] = weakref.WeakKeyDictionary()
        self._patch = Patch(Function, "__call__", self._noting, "xla.watch")
        self.events: list[Compilation] = []

    def open(self) -> None:
        with self._lock:
            self._watches += 1
            if self._watches == 1:
                put([self._patch])

    def sync(self, patience_seconds: float = PATIENCE_SECONDS) -> None:
        """Does nothing; signatures are noted at once."""

    def has_news(self) -> bool:
        """Returns True; asking is cheap."""
        return True

    def close(self) -> None:
        with self._lock:
            self._watches -= 1
            if not self._watches:
                undo([self._patch])

    def _noting(self, original: Any) -> Any:
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
    """What tf.function keys its traces by: a tensor's shape and dtype, a plain value, the type of anything else."""
    if isinstance(value, _PLAIN):
        return repr(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None:
        return type(value).__name__
    known = getattr(shape, "rank", 0) is not None
    return f"{tf.as_dtype(dtype).name} {tuple(shape) if known else '(of unknown rank)'}"


_COMPILER = _CompilerListener()
_SIGNATURES = _SignatureListener()


def _replace_listener() -> None:
    """Gives a forked child its own listener; the inherited one belongs to the parent."""
    global _COMPILER
    _COMPILER.abandon()
    _COMPILER = _CompilerListener()


os.register_at_fork(after_in_child=_replace_listener)
