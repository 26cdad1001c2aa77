"""What XLA compiles during `fit`."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.compilation_storm import storm
from tfopt.callbacks.order import running_list, warn_of_earlier_loggers
from tfopt.checks import integer
from tfopt.xla.watching import Compilations, Watch


class CompilationLogger(keras.callbacks.Callback):
    """Logs what XLA compiles during `model.fit`, and warns where it does not end.

    Every new shape of a batch is compiled anew, for seconds or minutes, and Keras does not tell. In `logs`, and so in
    Keras' history and in loggers that stand after this callback: `xla_compilations`, how many there were in the epoch,
    its validation included, and `xla_compilation_seconds`, what they took together. A training needs one, with
    validation two, and as many again where the last batch is smaller. Both are 0 without `jit_compile`, and absent
    where XLA's reports are not to be had (`tfopt.xla.watch`).

    A training that compiles one function more than `max_compilations` times is warned of once, with the input that
    causes it and the remedy.

    Only while a step runs does standard error pass the process that `tfopt.xla.watch` reads it with; a step costs some
    20 µs more, and is not waited for.

    Args:
        max_compilations: Compilations of one function in one `fit` that are in order. Default 4; with batches sorted
            into lengths, as many as there are lengths.

    Attributes:
        compilations: The `tfopt.xla.Compilations` of the last `fit`; None before the first.

    Raises:
        ValueError: `max_compilations` is below 1.
        TypeError: It is no integer.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begins to watch."""
        warn_of_earlier_loggers(self)
        self._end()  # an exception ended the fit before, without on_train_end
        self._watch = Watch()
        self.compilations = self._watch.compilations
        self._logged = self._executions = 0
        self._warned = False
        if self.compilations.reason:
            warnings.warn(f"No xla_compilations will be logged. {self.compilations.reason}", stacklevel=2)
        running = running_list()
        if running is not None:
            # Nobody tells this callback of an exception in another one, or of Ctrl-C; but fit's own list goes then.
            weakref.finalize(running, _end_of, weakref.ref(self), self._watch).atexit = False
        self._follow("train_function")

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Watches the step that a callback has put in place of the one before, as `tfopt.xla.set_jit` does."""
        self._follow("train_function")

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Watches the validation too."""
        self._follow("test_function")

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Looks for a storm, ever more seldom: reading takes a millisecond."""
        self._executions += 1
        if self._executions & (self._executions - 1) == 0:
            self._warn_of_storm()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the epoch's figures to the logs."""
        if self._watch is None or self.compilations is None:
            return
        self._warn_of_storm()
        events = self.compilations.events[self._logged :]
        self._logged += len(events)
        if logs is not None and self.compilations.source == "compilations":
            logs["xla_compilations"] = len(events)
            logs["xla_compilation_seconds"] = sum((event.seconds or 0.0 for event in events), 0.0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Ends watching."""
        self._end()

    def _follow(self, name: str) -> None:
        """Lets a step function of the model be watched while it runs, and only then."""
        watch, stock = self._watch, getattr(self.model, name, None)
        if watch is None or stock is None or any(step.watch is watch for step in _watched(stock)):
            return
        step = _WatchedStep(stock, watch, self._end)
        self._steps.append((self.model, name, step))
        setattr(self.model, name, step)

    def _warn_of_storm(self) -> None:
        if self._warned or self.compilations is None:
            return
        found = storm(self.compilations.events, self._max_compilations)
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
    """A step function that is watched while it runs."""

    def __init__(self, stock: Any, watch: Watch, end: Callable[[], None]):
        functools.update_wrapper(self, stock)
        self.stock, self.watch, self._end = stock, watch, end

    def __call__(self, iterator: Any) -> Any:
        self.watch.resume()
        try:
            return self.stock(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):  # the data has ended, not fit
            raise
        except BaseException:
            self._end()  # fit ends without on_train_end
            raise
        finally:
            self.watch.pause()


def _watched(step: Any) -> Iterator[_WatchedStep]:
    """The watched steps around a step function, the outermost first."""
    while isinstance(step, _WatchedStep):
        yield step
        step = step.stock


def _end_of(logger: "weakref.ref[CompilationLogger]", watch: Watch) -> None:
    """Ends what a fit that is no more began, unless the callback serves another one by now."""
    alive = logger()
    if alive is not None and alive._watch is watch:
        alive._end()
    watch.stop()
