"""XLA's compilations, counted while a block of code runs."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfopt.errors import UnsupportedError
from tfopt.xla.compilation import Compilation, History
from tfopt.xla.reports import Reports
from tfopt.xla.signatures import SignatureListener
from tfopt.xla.stderr_tap import StderrTap
from tfopt.xla.verbosity import Verbosity

_SHOWN = 10


@contextmanager
def watch() -> Iterator["Compilations"]:
    """Counts XLA's compilations in the block, with the seconds and the cause of each.

    Use it where a step that should run steadily stalls now and then: every new shape of an input is compiled anew, for
    seconds or minutes, and neither Keras nor `experimental_get_tracing_count()` tells. It costs nothing a step. It
    may be nested, and sees what all threads compile.

    In the block, standard error (file descriptor 2) passes a process that takes XLA's lines out; everything else comes
    out unchanged, also after a crash. No line is logged outside of a block.

    Where XLA's reports are not to be had, what is counted are the input signatures that functions with
    `jit_compile=True` are called with, and `str()` says so: no standard error, or a TensorFlow whose log cannot be
    asked. That count is too low under `fit`, where batches do not pass Python.

    Yields:
        The `Compilations`, to be read in the block or after it.

    Example:
        >>> with tfopt.xla.watch() as compilations:
        ...     model.fit(dataset)
        >>> print(compilations)
        2 XLA compilations, 3.36 s
          one_step_on_data: 1.91 s, its first compilation here
          one_step_on_data: 1.45 s, input 0: (32, 8, 8, 1) → (17, 8, 8, 1), input 1: (32,) → (17,)
    """
    watching = Watch()
    try:
        watching.resume()
        yield watching.compilations
    finally:
        watching.stop()


class Compilations:
    """What XLA compiled while it was watched.

    Attributes:
        source: "compilations", as XLA reports them; "signatures" where those were not to be had.
        reason: Why not; None where they were.
    """

    def __init__(self, listener: "_CompilerListener | SignatureListener", reason: str | None):
        listener.sync()
        self.source = listener.source
        self.reason = reason
        self._listener = listener
        self._start = len(listener.events)
        self._end: int | None = None

    @property
    def events(self) -> tuple[Compilation, ...]:
        """Each compilation, in the order in which they ended."""
        if self._end is None:
            self._listener.sync()
        return tuple(self._listener.events[self._start : self._end])

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self.events)

    @property
    def seconds(self) -> float | None:
        """What they took together, in seconds; None where only signatures were counted."""
        return sum(event.seconds or 0.0 for event in self.events) if self.source == "compilations" else None

    def end(self) -> None:
        """Counts no more."""
        if self._end is None:
            self._listener.sync()
            self._end = len(self._listener.events)

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        events = self.events
        plain = {"source": self.source, "reason": self.reason, "count": len(events), "seconds": self.seconds}
        return plain | {"events": [event.to_dict() for event in events]}

    def __str__(self) -> str:
        events = self.events
        plural = "" if len(events) == 1 else "s"
        if self.source == "compilations":
            head = f"{len(events)} XLA compilation{plural}, {self.seconds:.3g} s"
        else:
            head = f"{len(events)} input signature{plural} of functions with jit_compile=True, without what fit's steps"
            head += f" take from a dataset; XLA's compilations could not be counted. {self.reason}"
        more = [f"  … and {len(events) - _SHOWN} more"] if len(events) > _SHOWN else []
        return "\n".join([head, *(f"  {event}" for event in events[:_SHOWN]), *more])


class Watch:
    """`watch()` for code that is no block: `resume` and `pause` in turn, `stop` at the end.

    It begins paused. Resuming and pausing take some 10 µs each: how much TensorFlow logs is raised and put back.

    Attributes:
        compilations: What was compiled while it was resumed.
    """

    def __init__(self) -> None:
        reason = None
        self._listener: _CompilerListener | SignatureListener = _COMPILER
        try:
            _COMPILER.open()
        except UnsupportedError as error:
            self._listener, reason = _SIGNATURES, str(error)
        self._on = self._stopped = False
        self.compilations = Compilations(self._listener, reason)

    def resume(self) -> None:
        """Counts from now on."""
        if not self._on and not self._stopped:
            self._on = True
            self._listener.resume()

    def pause(self) -> None:
        """Counts nothing from now on, unless another watch does."""
        if self._on:
            self._on = False
            self._listener.pause()

    def stop(self) -> None:
        """Ends it for good; does nothing the second time."""
        if not self._stopped:
            self._stopped = True
            try:
                self.pause()
                self.compilations.end()
            finally:
                self._listener.close()


class _CompilerListener:
    """The one tap on standard error of this process, for all watches that are open at a time."""

    source = "compilations"

    def __init__(self) -> None:
        self._reports = Reports(History())
        self._tap: StderrTap | None = None
        self._verbosity: Verbosity | None = None
        self.events: list[Compilation] = []
        self._lock = threading.RLock()
        self._watches = self._on = 0

    def abandon(self) -> None:
        """Ends in a forked process: its standard error and its log are what they were before."""
        self._lock = threading.RLock()  # a thread that is not here any more may have held the one before
        if self._tap and self._verbosity:
            self._verbosity.down()
            self._tap.abandon()
            self._tap = None

    def open(self) -> None:
        with self._lock:
            if not self._tap:
                self._verbosity = Verbosity()
                self._tap = StderrTap(hidden=self._verbosity.hidden, copy=self._verbosity.asked)
            self._watches += 1

    def resume(self) -> None:
        with self._lock:
            self._on += 1
            if self._on == 1 and self._tap and self._verbosity:
                self._tap.on()
                self._verbosity.up()

    def pause(self) -> None:
        with self._lock:
            self._on -= 1
            if self._on == 0 and self._tap and self._verbosity:
                self._verbosity.down()
                self._tap.off()

    def sync(self) -> None:
        """Reads what has been reported up to now."""
        with self._lock:
            if self._tap:
                self.events += self._reports.read(self._tap.lines())

    def close(self) -> None:
        with self._lock:
            self._watches -= 1
            if self._watches == 0 and self._tap and self._verbosity:
                tap, self._tap = self._tap, None
                self._verbosity.down()
                tap.close()


_COMPILER = _CompilerListener()
_SIGNATURES = SignatureListener()


def _begin_anew() -> None:
    """A forked process is not watched by what it inherits: watches of its own have another listener."""
    global _COMPILER
    _COMPILER.abandon()
    _COMPILER = _CompilerListener()


os.register_at_fork(after_in_child=_begin_anew)
