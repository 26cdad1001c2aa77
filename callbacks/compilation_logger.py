"""Logs what XLA compiles during `fit`."""

import functools
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import end_with_fit, warn_of_earlier_loggers
from tfopt.checks import integer
from tfopt.xla.log.compilations import Compilation, sizes
from tfopt.xla.watching import Compilations, Watch

_FIXED_BATCH = (
    'Give every batch the same size: build_pipeline(..., remainder="drop"), or "pad", or '
    "dataset.batch(n, drop_remainder=True)."
)
_FIXED_SIZES = (
    "Give it one shape: pad to a fixed length or size, or bucket by length (tf.data.Dataset.bucket_by_sequence_length "
    "with pad_to_bucket_boundary=True, and max_compilations set to how many there are)."
)
_FIXED_DTYPE = "Cast it to one dtype in the dataset."
_SAME_SHAPES = (
    "Its shapes stay the same: pass numbers that change as tensors, and make no tf.function inside the training loop."
)


class CompilationLogger(keras.callbacks.Callback):
    """Logs what XLA compiles during `model.fit`, and warns if it keeps recompiling.

    XLA recompiles a step for every new shape of a batch, for seconds or minutes, without a word from Keras. A training
    needs one compilation, two with validation, and as many again if the last batch is smaller. One function compiled
    more than `max_compilations` times is warned of once, with the input that changes and the remedy.

    In `logs`, and so in Keras' history and later loggers: `xla_compilations` and `xla_compilation_seconds` of the epoch
    with its validation. Both are 0 without `jit_compile`, and absent if XLA's reports are unavailable
    (`tfopt.xla.watch`).

    Args:
        max_compilations: Tolerated compilations of one function in one `fit`. Default 4: training and validation, each
            with a smaller last batch. With batches bucketed by length, give the number of buckets.

    Raises:
        ValueError: If `max_compilations` is below 1.
        TypeError: If it is not an integer.

    Example:
        >>> model.fit(dataset, callbacks=[tfopt.callbacks.CompilationLogger()])
    """

    def __init__(self, max_compilations: int = 4):
        super().__init__()
        self._max_compilations = integer(
            "max_compilations", max_compilations, "A training whose last batch is smaller needs 2.", least=1
        )
        self._watch: Watch | None = None
        self._steps: list[tuple[keras.Model, str, _WatchedStep]] = []
        self.compilations: Compilations | None = None
        """The compilations of the last `fit`; None before the first."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts watching."""
        warn_of_earlier_loggers(self)
        self._end()  # if an exception ended the previous fit
        self._watch = Watch()
        self.compilations = self._watch.compilations
        self._logged = self._executions = 0
        self._warned = False
        if self.compilations.reason:
            warnings.warn(f"No xla_compilations will be logged. {self.compilations.reason}", stacklevel=2)
        end_with_fit(self, functools.partial(_end_of, weakref.ref(self), self._watch), at_exit=False)
        self._follow("train_function")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Watches a step function that a callback has replaced, as `tfopt.xla.set_jit` does."""
        self._follow("train_function")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Watches the validation too."""
        self._follow("test_function")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for repeated compilations, at steps 1, 2, 4, 8, …: reading takes a millisecond."""
        self._executions += 1
        if self._executions & (self._executions - 1) == 0:
            self._warn_of_repetition()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if self._watch is None or self.compilations is None:
            return
        self._warn_of_repetition()
        events = self.compilations.events[self._logged :]
        self._logged += len(events)
        if logs is not None and self.compilations.source == "compilations":
            logs["xla_compilations"] = len(events)
            logs["xla_compilation_seconds"] = sum((event.seconds or 0.0 for event in events), 0.0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops watching."""
        self._end()

    def _follow(self, name: str) -> None:
        """Watches a step function of the model while it runs, and only then."""
        watch, stock = self._watch, getattr(self.model, name, None)
        if watch is None or stock is None or any(step.watch is watch for step in _watched(stock)):
            return
        step = _WatchedStep(stock, watch, self._end)
        self._steps.append((self.model, name, step))
        setattr(self.model, name, step)

    def _warn_of_repetition(self) -> None:
        if self._warned or self.compilations is None:
            return
        found = repeated_compilation(self.compilations.events, self._max_compilations)
        if found:
            self._warned = True
            warnings.warn(found, stacklevel=2)

    def _end(self) -> None:
        steps, self._steps = self._steps, []
        for model, name, step in steps:
            outermost = getattr(model, name, None)
            if outermost is step:
                setattr(model, name, step.stock)
            for outer in _watched(outermost):  # another logger's
                if outer.stock is step:
                    outer.stock = step.stock
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop()


class _WatchedStep:
    """A step function, watched while it runs."""

    def __init__(self, stock: Any, watch: Watch, end: Callable[[], None]):
        functools.update_wrapper(self, stock)
        self.stock, self.watch, self._end = stock, watch, end

    def __call__(self, iterator: Any) -> Any:
        self.watch.resume()
        try:
            return self.stock(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the data ended, not fit
            raise
        except BaseException:
            self._end()  # fit ends without on_train_end
            raise
        finally:
            self.watch.pause()


def _watched(step: Any) -> Iterator[_WatchedStep]:
    """The watched steps around a step function, outermost first."""
    while isinstance(step, _WatchedStep):
        yield step
        step = step.stock


def _end_of(logger: "weakref.ref[CompilationLogger]", watch: Watch) -> None:
    """Ends the watch of a fit that is gone, unless the callback serves another one by now."""
    alive = logger()
    if alive is not None and alive._watch is watch:
        alive._end()
    watch.stop()


def repeated_compilation(events: Iterable[Compilation], limit: int) -> str | None:
    """Returns a warning about a function compiled more than `limit` times in a training, or None."""
    functions: dict[tuple[str, tuple[str, ...]], list[Compilation]] = defaultdict(list)
    for event in events:
        functions[event.function, event.variables].append(event)
    most = max(functions.values(), key=len, default=[])
    if len(most) <= limit:
        return None
    known = [event.seconds for event in most if event.seconds is not None]
    seconds = f" in {sum(known):.3g} s" if known else ""
    number = _culprit(most)
    last = next((event for event in reversed(most) if number in event.changed), most[-1])
    return (
        f"Expected at most {limit} XLA compilations of {last.function} in one training. Found {len(most)}{seconds}, "
        f"again and again for {last.cause}. {_remedy(most, number)}"
    )


def _culprit(events: list[Compilation]) -> int | None:
    """The input that changed most often, the first of several."""
    counts = Counter(number for event in events for number in event.changed)
    return max(sorted(counts), key=lambda number: counts[number], default=None)


def _remedy(events: list[Compilation], number: int | None) -> str:
    if number is None:
        return _SAME_SHAPES
    texts = [event.inputs[number] for event in events if number in event.inputs]
    shapes = {sizes(text) for text in texts}
    if len(shapes) == 1:
        return _FIXED_DTYPE
    same_but_first = len({shape[1:] for shape in shapes}) == 1
    return f"Input {number} is to blame. {_FIXED_BATCH if same_but_first else _FIXED_SIZES}"
