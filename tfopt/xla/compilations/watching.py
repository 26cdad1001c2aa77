"""Counts XLA's compilations while a block of code runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfopt import checks
from tfopt.text import Shown
from tfopt.xla.compilations.compilation import Compilation
from tfopt.xla.compilations.recompilation import Reactor, check_stance
from tfopt.xla.compilations.signatures import SIGNATURES

_SHOWN = 10


@contextmanager
def watch(*, on_recompile: str | None = None, limit: int = 4) -> Iterator["Compilations"]:
    """Counts XLA's compilations in the block, with the duration and cause of each, and can act on repeated ones.

    Use it when training stalls now and then: XLA compiles every new input shape, which takes seconds or minutes, and
    neither Keras nor `experimental_get_tracing_count()` shows it. Blocks can be nested and see all threads.

    TensorFlow does not report compilations. What is counted are the input signatures (shapes and dtypes) that traced
    functions with `jit_compile=True` run with for the first time in a watch of this process; XLA compiles each of them
    once. So a signature that ran before the first watch is counted when it runs in one, in milliseconds. Compilations
    for other values of an input that XLA treats as constant, for a second device, of functions that tf.data calls, or
    by automatic clustering (`tf.config.optimizer.set_jit`) are not counted.

    A watched step of `fit` takes about 0.15 ms more CPU time. A `tf.function` that calls compiled ones, such as Keras'
    train function, is traced once more for the watch, without what it calls; nothing is compiled again.

    Args:
        on_recompile: What to do once a function has been compiled more than `limit` times in the block. "warn": warn
            once. "error": raise. "eager": warn, and run the Keras model that the step belongs to without XLA from its
            next step on, as `set_jit(model, False)` does; a function outside Keras models keeps XLA. None: only count.
            It acts in the thread of the block, when the call of a `tf.function`, such as a step of `fit`, has ended.
            By then the compilation that exceeded the limit has happened.
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
        2 XLA compilations (new input signatures), 3.36 s with their first runs
          training step: 1.91 s, its first run in a watch
          training step: 1.45 s, x: (32, 8, 8, 1) → (17, 8, 8, 1), y: (32,) → (17,)
    """
    if on_recompile is not None:
        check_stance(on_recompile)
    checks.integer("limit", limit, "A training whose last batch is smaller needs 2.", least=1)
    compilations = Compilations()
    reactions = [Reactor(lambda: compilations.events, on_recompile, limit).after_call] if on_recompile else []
    SIGNATURES.after_call += reactions
    try:
        yield compilations
    finally:
        for reaction in reactions:
            SIGNATURES.after_call.remove(reaction)
        compilations.end()


class Compilations(Shown):
    """What XLA compiled during a watch: a compilation for each input signature that ran for the first time.

    It counts from when it is made until `end` is called.
    """

    def __init__(self) -> None:
        SIGNATURES.open()
        self._start = len(SIGNATURES.events)
        self._end: int | None = None

    @property
    def events(self) -> tuple[Compilation, ...]:
        """Compilations in the order they ended."""
        return tuple(SIGNATURES.events[self._start : self._end])

    @property
    def count(self) -> int:
        """Number of compilations."""
        return len(self.events)

    @property
    def seconds(self) -> float:
        """Total wall time of the first runs, each with its compilation."""
        return sum((event.seconds for event in self.events), 0.0)

    @property
    def ended(self) -> bool:
        """Whether it has stopped counting."""
        return self._end is not None

    def end(self) -> None:
        """Stops counting. A second call does nothing."""
        if self._end is None:
            self._end = len(SIGNATURES.events)
            SIGNATURES.close()

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        events = self.events
        return {"count": len(events), "seconds": self.seconds, "events": [event.to_dict() for event in events]}

    def __str__(self) -> str:
        events = self.events
        plural = "" if len(events) == 1 else "s"
        head = (
            f"{len(events)} XLA compilation{plural} (new input signatures), {self.seconds:.3g} s with their first runs"
        )
        more = [f"  … and {len(events) - _SHOWN} more"] if len(events) > _SHOWN else []
        return "\n".join([head, *(f"  {event}" for event in events[:_SHOWN]), *more])
