"""How callbacks share readings: the loggers take them once, and other callbacks subscribe.

A callback that needs readings finds their source in fit's list, wherever it stands there, or adds one.
"""

import math
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from numbers import Real
from typing import Any, TypeVar

import keras

from tfopt.callbacks.shared.running_fit import running_list
from tfopt.internals.fit_door import join_list
from tfopt.warn import warn_once

Source = TypeVar("Source", bound=keras.callbacks.Callback)

# The measurements among the fields of ThroughputLogger's readings.
THROUGHPUT_KEYS = (
    "step_time_ms",
    "step_time_p95_ms",
    "step_time_p99_ms",
    "examples_per_second",
    "tokens_per_second",
    "input_wait_percent",
    "model_tflops_per_second",
    "mfu_percent",
)


def throughput_weight(name: str, row: Mapping[str, Any]) -> float:
    """Returns how much one of a row's figures counts in a mean: a step's time by the steps, all others by seconds."""
    weight: float = row.get("window_steps" if name.startswith("step_time") else "window_seconds", 1.0)
    return max(weight, 1e-9)  # a clock may stand still


def find_source(kind: type[Source], user: keras.callbacks.Callback) -> Source:
    """Returns the running fit's callback of a kind; adds one if there is none. Call it from `on_train_begin`.

    An added one, made without arguments, stands at the end of fit's list, after Keras' history, so that its keys appear
    in no history.
    """
    running = running_list(user)
    for callback in running.callbacks if running else ():
        if isinstance(callback, kind):
            return callback
    added = kind()
    added.added_for_another = True  # nobody expects its keys in the logs
    if running is not None:
        added.set_params(running.params)
        added.set_model(user.model)
        # Keras is looping over this list to call on_train_begin, and will reach the added one too.
        join_list(added, running)
    return added


def subscribe(
    user: keras.callbacks.Callback,
    methods: Mapping[type[keras.callbacks.Callback], Callable[[Any], object]],
    ending: ExitStack,
) -> None:
    """Subscribes bound methods of a callback to readings of the running fit until `ending` is closed.

    Call it from `on_train_begin`. `UtilizationLogger` passes on each sample of the GPUs and the host, in the sampler's
    thread; `ThroughputLogger` its figures, in the training thread, about once a second.
    """
    for kind, method in methods.items():
        listeners = find_source(kind, user).listeners
        listeners.add(method)
        ending.callback(listeners.remove, method)


class Listeners:
    """The methods a source calls with its readings. It does not keep their callbacks alive.

    A method that raises is reported once; the others are still called, and the training goes on.
    """

    def __init__(self) -> None:
        self._methods: tuple[weakref.WeakMethod[Callable[..., Any]], ...] = ()

    def add(self, method: Callable[..., Any]) -> None:
        """Adds a bound method, which is called once however often it is added."""
        self.remove(method)
        self._methods = (*self._methods, weakref.WeakMethod(method))

    def remove(self, method: Callable[..., Any]) -> None:
        """Removes a method; does nothing if it was not added."""
        # Replaced, not mutated: another thread may be iterating over it.
        self._methods = tuple(other for other in self._methods if other() not in (None, method))

    def __call__(self, *readings: Any) -> None:
        """Calls each method, in the order in which they were added."""
        for reference in self._methods:
            method = reference()
            if method is None:
                continue
            try:
                method(*readings)
            except Exception as error:  # noqa: BLE001  an observer must not end a training
                name = method.__qualname__
                text = f"Expected {name} to take a reading. Found: {error!r}. The training goes on without it."
                warn_once(f"listener {name} {type(error).__name__}", text, error=error)

    def __reduce__(self) -> tuple[Any, ...]:
        return Listeners, ()  # a copy of a source begins without listeners


def finite(values: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the values that are finite numbers, as floats, by name.

    Example:
        >>> finite({"loss": 0.5, "val_loss": math.nan, "name": "first"})
        {'loss': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Real):
            with suppress(OverflowError):  # an integer or a fraction larger than any float
                numbers[str(name)] = float(value)
    return {name: number for name, number in numbers.items() if math.isfinite(number)}
