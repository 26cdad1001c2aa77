"""What a case of benchmarks/pipelines.py is: a question, its goal, and the ways to feed a training, measured in turn.

Every example's label is its number, so that a pass can be checked: all examples once, and each what it should be.
"""

import gc
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

TFOPT, HAND, GRAIN, TORCH = "tfopt", "tf.data by hand", "Grain", "PyTorch"
CLOCKS = {"wall_ms": time.perf_counter, "cpu_ms": time.process_time}
_SECONDS = 0.3  # a turn goes through whole epochs for at least as long
_SLOW_SECONDS = 1.5  # a way whose pass takes longer takes part in one turn of three


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the data are."""

    small_rows: int = 100_000  # of 64 bytes, in arrays
    records: int = 40_000  # of 64 bytes, in files
    images: int = 20_000  # of 32×32
    large_rows: int = 2_000  # of 150 KB
    cached_rows: int = 1_000  # of 150 KB, on disk
    files: int = 10_000
    photos: int = 512  # JPEG files
    batch: int = 256
    photo_batch: int = 32
    turns: int = 11


TINY = Scale(
    small_rows=600,
    records=600,
    images=300,
    large_rows=20,
    cached_rows=20,
    files=1_200,
    photos=64,
    batch=8,
    photo_batch=8,
    turns=2,
)


@dataclass(frozen=True, slots=True)
class Goal:
    """What tfopt should reach."""

    bound: float
    text: str  # for the table
    of_time: bool = False  # at most so many times the time by hand; default: at least so many times its speed

    def met(self, speed: float) -> bool:
        """Whether a speed, in times of that by hand, reaches it."""
        return 1 / speed <= self.bound if self.of_time else speed >= self.bound


def at_least(speed: float) -> Goal:
    """The goal of so many times the speed by hand."""
    return Goal(speed, f"≥ {speed:g}×")


def at_most(time_ratio: float) -> Goal:
    """The goal of at most so many times the time by hand."""
    return Goal(time_ratio, f"≤ {time_ratio:g}× the time", of_time=True)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to feed a training."""

    name: str
    note: str  # how it is written
    make: Callable[[], Iterable[Any]]  # returns a new input
    skipped: str | None = None  # why there is none


def no_way(name: str, why: str) -> Way:
    """A way that there is not."""
    return Way(name, "", list, skipped=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A question, and the ways that answer it."""

    question: str
    goal: Goal | None  # None: none was set
    ways: list[Way]  # with one of the name HAND
    examples: int
    batch: int
    timed: str = "epoch"  # a key of TURNS
    name: str = ""  # its key in CASES
    right: Callable[[Any, Any], bool] | None = None  # given inputs and labels of a batch: whether they belong together

    @property
    def unit(self) -> str:
        """What a sample times."""
        return TURNS[self.timed].unit


@dataclass(frozen=True, slots=True)
class Timed:
    """A kind of turn."""

    unit: str
    take: Callable[[Way, Any], dict[str, float]]  # from the way, and what it made once
    fresh: bool  # whether the input is rebuilt for each turn
    checked: bool = True  # whether one pass is checked


class _Watch:
    """Reads the clocks from when it is made."""

    def __init__(self):
        self._started = {name: clock() for name, clock in CLOCKS.items()}

    def each(self, count: int = 1) -> dict[str, float]:
        """Milliseconds for each of so many, by clock."""
        return {name: 1000 * (clock() - self._started[name]) / count for name, clock in CLOCKS.items()}


def _whole_epochs(way: Way, made: Any) -> dict[str, float]:
    # Never a part of one: what a way reads ahead, or fills a buffer with, belongs to the batches that follow.
    count, watch, due = 0, _Watch(), time.perf_counter() + _SECONDS
    while time.perf_counter() < due:
        count += sum(1 for _ in made)
    return watch.each(count)


def _one_epoch(way: Way, made: Any) -> dict[str, float]:
    watch = _Watch()
    return watch.each(sum(1 for _ in made))


def _first_batch(way: Way, made: Any) -> dict[str, float]:
    watch = _Watch()
    iterator = iter(made)
    next(iterator)
    found = watch.each()
    del iterator
    return found


def _making(way: Way, made: Any) -> dict[str, float]:
    watch = _Watch()
    way.make()
    return watch.each()


TURNS = {
    "epoch": Timed("batch, in whole epochs after the first", _whole_epochs, fresh=False),
    "first epoch": Timed("batch of the first epoch", _one_epoch, fresh=True),
    "first batch": Timed("first batch, from iter() on", _first_batch, fresh=True),
    "plan": Timed("plan and build", _making, fresh=False, checked=False),
    "copy": Timed("copy of all files", _making, fresh=False, checked=False),
}


Samples = dict[str, dict[str, list[float | None]]]
"""Milliseconds by way and by clock: a value for each turn, None for one that a slow way left out."""


def measure(case: Case, turns: int, report: Callable[[dict[str, Any]], Any] = lambda found: None) -> dict[str, Any]:
    """Checks each way by one pass over its data, then measures them in turn; reports the case's JSON after each round.

    The pass also fills caches, so later turns are of later epochs.
    """
    kind, ways = TURNS[case.timed], [way for way in case.ways if not way.skipped]
    made, specs, slow = {}, {}, set()
    for way in ways:
        made[way.name] = way.make()
        if kind.checked:
            specs[way.name] = check(case, way, made[way.name])
            started = time.perf_counter()
            if kind.take is _whole_epochs and sum(1 for _ in made[way.name]):
                slow |= {way.name} if time.perf_counter() - started > _SLOW_SECONDS else set()
    if len(set(specs.values())) > 1:
        raise AssertionError(f"{case.name}: batches differ: {specs}")
    samples: Samples = {way.name: {clock: [] for clock in CLOCKS} for way in ways}
    for turn in range(turns):
        for way in ways:
            if way.name in slow and turn % 3:
                found = dict.fromkeys(CLOCKS)
            else:
                if kind.fresh:
                    made[way.name] = way.make()
                gc.collect()
                found = kind.take(way, made[way.name])
            for clock, value in found.items():
                samples[way.name][clock].append(value)
        report(to_json(case, samples))
    return to_json(case, samples)


def check(case: Case, way: Way, made: Iterable[Any]) -> tuple[Any, ...]:
    """Goes through one epoch: full batches, each example at most once, inputs that belong to their labels.

    Returns the shapes and dtypes of a batch.
    """
    seen, specs = [], set()
    for one in made:
        inputs, labels = map(_as_array, (one["x"], one["label"]) if isinstance(one, dict) else one)
        seen.append(labels)
        specs.add((inputs.shape, inputs.dtype.name, labels.shape, labels.dtype.name))
        if case.right is not None and not case.right(inputs, labels):
            raise AssertionError(f"{case.name}, {way.name}: inputs do not belong to their labels {labels}")
    numbers = np.concatenate(seen)
    expected = case.examples // case.batch * case.batch
    if len(specs) != 1 or len(numbers) != expected or len(np.unique(numbers)) != expected:
        found = f"{specs}, {len(numbers)} examples, {len(np.unique(numbers))} different"
        raise AssertionError(f"{case.name}, {way.name}: expected {expected} examples, each once. Found: {found}")
    if case.batch > 1 and np.array_equal(numbers, np.sort(numbers)):
        raise AssertionError(f"{case.name}, {way.name}: not shuffled")
    return specs.pop()


def _as_array(part: Any) -> Any:
    return (
        np.stack([np.asarray(part[name]) for name in sorted(part)], -1) if isinstance(part, dict) else np.asarray(part)
    )


def to_json(case: Case, samples: Samples) -> dict[str, Any]:
    """The case and its samples as JSON values."""
    goal = case.goal
    return {
        "name": case.name,
        "question": case.question,
        "unit": case.unit,
        "goal": None if goal is None else {"bound": goal.bound, "text": goal.text, "of_time": goal.of_time},
        "examples": case.examples,
        "batch_size": case.batch,
        "ways": [
            {"name": way.name, "note": way.note, "skipped": way.skipped} | samples.get(way.name, {})
            for way in case.ways
        ],
    }
