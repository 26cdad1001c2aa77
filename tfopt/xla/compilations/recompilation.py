"""Warns, raises or switches XLA off when a function is compiled again and again."""

import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import keras

from tfopt.errors import TfoptError
from tfopt.xla.compilations.compilation import Compilation, sizes
from tfopt.xla.compilations.traced_functions import traced_function
from tfopt.xla.toggles import set_jit

_STANCES = ("warn", "error", "eager")

_FIXED_BATCH = (
    'Give every batch the same size: build_pipeline(..., remainder="drop"), or "pad", or '
    "dataset.batch(n, drop_remainder=True)."
)
_FIXED_SIZES = (
    "Give it one shape: pad to a fixed length or size, or bucket by length (tf.data.Dataset.bucket_by_sequence_length "
    "with pad_to_bucket_boundary=True, and allow as many compilations as there are buckets)."
)
_FIXED_DTYPE = "Cast it to one dtype in the dataset."
_SAME_SHAPES = (
    "Its shapes stay the same: pass numbers that change as tensors, and make no tf.function inside the training loop."
)


@dataclass(frozen=True, slots=True)
class Repetition:
    """A function that was compiled more often than allowed."""

    events: tuple[Compilation, ...]
    """Its compilations."""
    limit: int
    """How many are allowed."""

    def __str__(self) -> str:
        seconds = sum(event.seconds for event in self.events)
        number = self._culprit()
        last = next((event for event in reversed(self.events) if number in event.changed), self.events[-1])
        return (
            f"Expected at most {self.limit} XLA compilations of {last.label}. Found {len(self.events)} in "
            f"{seconds:.3g} s, again and again for {last.cause}. {self._remedy(number)}"
        )

    def _culprit(self) -> int | None:
        """The input that changed most often, the first of several."""
        counts = Counter(number for event in self.events for number in event.changed)
        return max(sorted(counts), key=lambda number: counts[number], default=None)

    def _remedy(self, number: int | None) -> str:
        if number is None:
            return _SAME_SHAPES
        events = [event for event in self.events if number in event.inputs]
        shapes = {sizes(event.inputs[number]) for event in events}
        if len(shapes) == 1:
            return _FIXED_DTYPE
        same_but_first = len({shape[1:] for shape in shapes}) == 1
        return f"The cause is {events[-1].name_of(number)}. {_FIXED_BATCH if same_but_first else _FIXED_SIZES}"


def repeated_compilation(events: Iterable[Compilation], limit: int) -> Repetition | None:
    """Returns the function compiled most often, if that is more than `limit` times."""
    functions: dict[tuple[str, tuple[str, ...]], list[Compilation]] = defaultdict(list)
    for event in events:
        functions[event.label, event.variables].append(event)
    most = max(functions.values(), key=len, default=[])
    return Repetition(tuple(most), limit) if len(most) > limit else None


def check_stance(on_recompile: str) -> None:
    """Raises a ValueError if `on_recompile` is not "warn", "error" or "eager"."""
    if on_recompile not in _STANCES:
        raise ValueError(
            f"Expected on_recompile to be one of {', '.join(map(repr, _STANCES))}. Received: {on_recompile!r}. "
            'Pass "warn" to train on, "error" to stop, or "eager" to train on without XLA.'
        )


def react(found: Repetition, on_recompile: str, models: Iterable[keras.Model]) -> None:
    """Warns, raises, or switches XLA off for the models, which run without it from their next step on.

    Raises:
        tfopt.errors.TfoptError: If `on_recompile` is "error".
    """
    if on_recompile == "error":
        raise TfoptError(str(found))
    models = list(models)
    without = ""
    if on_recompile == "eager":
        for model in models:
            set_jit(model, False)
        names = " and ".join(repr(model.name) for model in models)
        without = (
            f" From now on {names} runs without XLA."
            if models
            else " It is not a step of a Keras model, so XLA stays on."
        )
    warnings.warn(f"{found}{without}", stacklevel=3)


def models_of(found: Repetition) -> list[keras.Model]:
    """The Keras models whose steps were compiled too often."""
    functions = (traced_function(module) for module in {event.module for event in found.events})
    models = {id(function.model): function.model for function in functions if function and function.model is not None}
    return list(models.values())


class Reactor:
    """Reacts to repeated compilations, in the thread that made the reactor."""

    def __init__(self, events: Callable[[], Sequence[Compilation]], on_recompile: str, limit: int):
        self._events, self._on_recompile, self._limit = events, on_recompile, limit
        self._thread = threading.get_ident()
        self._seen = 0
        self._handled: set[tuple[str, tuple[str, ...]]] = set()

    def after_call(self) -> None:
        """Looks for new compilations; to be called when a tf.function has ended."""
        if threading.get_ident() != self._thread:
            return
        events = self._events()
        if len(events) == self._seen:
            return
        self._seen = len(events)
        left = [event for event in events if (event.label, event.variables) not in self._handled]
        found = repeated_compilation(left, self._limit)
        if found:
            if self._on_recompile != "error":  # which is raised for every further compilation
                self._handled.add((found.events[0].label, found.events[0].variables))
            react(found, self._on_recompile, models_of(found) if self._on_recompile == "eager" else ())
