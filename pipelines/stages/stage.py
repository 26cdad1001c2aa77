"""A stage of a plan, and the dataset that goes through the stages."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.sample import ShapeCheck
from tfopt.pipelines.shared.elements import element_of, in_single_examples
from tfopt.pipelines.shared.epochs import Draw, Epoch, Place, Position, Readings, in_chunks, in_epochs
from tfopt.pipelines.shared.nondeterminism import find_in_function, refuse_restarting
from tfopt.pipelines.shared.options import StageFunction
from tfopt.pipelines.shared.seeding import (
    bits_from,
    call_in_turn,
    from_batches,
    in_batches,
    of_length,
    with_drawn_bits,
    with_random_bits,
)

_BITS = 1024  # that are drawn together


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline, as the plan prints it and `build` applies it."""

    # "read", "mix", "balance", "decode", "crop", "transform", "cache", "shuffle", "augment", "batch", "gather" (on the
    # device), "service", "pad", "prefetch", "device", "overlap", "order" or "memory"
    name: str
    setting: str
    reason: str

    def apply(self, flow: "Flow") -> None:
        """Applies the stage to the dataset; one that only informs does nothing."""

    def summary(self) -> dict[str, Any]:
        """Returns what the stage adds to the plan's JSON values."""
        return {}

    def within(self) -> "tuple[Stage, ...]":
        """Returns the stages of its own that it has; a part of a mixture has some."""
        return ()

    @property
    def caches(self) -> bool:
        """Whether all iterations share what it gives."""
        return False

    @property
    def at_once(self) -> int:
        """How many examples its function takes at once; all such functions of a pipeline take as many."""
        return 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the stage's line in the plan as JSON values."""
        return {"name": self.name, "setting": self.setting, "reason": self.reason}


def all_of(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yields stages, and those within them."""
    for stage in stages:
        yield stage
        yield from all_of(stage.within())


def split_at_cache(stages: Sequence[Stage]) -> tuple[Sequence[Stage], Sequence[Stage]]:
    """Returns the stages up to the cache, which all iterations share, and those after it."""
    after = max((at + 1 for at, stage in enumerate(stages) if stage.caches), default=0)
    return stages[:after], stages[after:]


@dataclass(slots=True)
class Flow:
    """A dataset on its way through the stages."""

    description: str  # of the whole plan; a cache on disk keeps it for its readers
    place: Place  # of the whole dataset
    is_served: bool = False  # whether a tf.data service makes it, and draws anew for each epoch
    number: int | None = None  # of the part of a mixture
    dataset: Any = None
    cached: Any = None  # the `Cached` examples of the dataset's elements, which wait for their order
    epoch: Epoch | None = None  # the only one that this is, as of the part of a mixture, which is made within one
    size: int = 1  # examples in a batch
    window: int = 1  # batches that are left out together; others are made and dropped
    parts: list["Flow"] = field(default_factory=list)  # of a mixture, each up to its cache
    settings: Any = field(default_factory=tf.data.Options)
    outside: list[Any] = field(default_factory=list)  # datasets that epochs read, and do not make
    # Called with the finished batches and the settings, in turn: nothing may follow a copy to the device.
    endings: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    check: ShapeCheck | None = None  # what the next map ends with
    has_begun: bool = False  # whether a stage has decided the order
    ends: bool = False  # whether the end of the data matters, as to a cache in memory: it is whole only then
    _functions: list[StageFunction] = field(default_factory=list)  # of the next map
    _draws: str = ""  # by which key these draw
    _at_once: int | None = None  # how many examples these take, if not one
    _maps: list["_Map | _MapChunks"] = field(default_factory=list)  # those that wait
    _is_raw: bool = True

    def of_part(self, epoch: Epoch) -> "Flow":
        """Returns a flow that goes on from here through an epoch of a part of a mixture."""
        return Flow(
            description=self.description,
            place=self.place,
            number=self.number,
            dataset=self.flush(),
            cached=self.cached,
            epoch=epoch,
            outside=self.outside,
            _is_raw=self._is_raw,
        )

    @property
    def is_moved(self) -> bool:
        """Whether each iteration is an epoch from a position on."""
        return self.epoch is None and not self.is_served

    def skipped(self, batch: Any) -> Any:
        """Returns how many elements the stage that decides the order leaves out, before a batch."""
        return (batch - batch % self.window if self.window > 1 else batch) * self.size

    def begin_numbers(self, drawn: Callable[[Position], Any], count: int) -> Any:
        """Does as `begin`, with the numbers below `count` that NumPy gives for the start of an epoch: int64 (count)."""
        self.has_begun = True
        draw = functools.lru_cache(1)(drawn)

        def chunk(position: Position, number: int) -> Any:
            # The last number comes alone: an iterator that was restored takes its position with it.
            numbers, skipped = draw(replace(position, batch=0)), self.skipped(position.batch)
            return numbers[skipped:-1] if number == 0 else numbers[-1:] if skipped < count else numbers[:0]

        chunks = in_chunks(self.place, chunk, 2, begins=True)
        return from_batches(chunks, None)

    def begin(self, made: Callable[[Epoch], Any]) -> Any:
        """Returns the dataset of what a function makes of each epoch, by the stage that decides the order."""
        self.has_begun = self.ends = True
        return self._in_epochs(made, begins=True)

    def go_on(self, made: Callable[[Epoch], Any]) -> Any:
        """Returns the same, by another stage: one after it, or one from which it reads."""
        return self._in_epochs(made, begins=False)

    def beside(self, dataset: Any, made: Callable[[Epoch], Any]) -> Any:
        """Pairs elements with those that a function makes of their epoch, which begins with the first of `dataset`.

        A `go_on` around the dataset would look for the epoch before it has begun, and find the one before.
        """
        return tf.data.Dataset.zip(dataset, self.go_on(made))

    def _in_epochs(self, made: Callable[[Epoch], Any], *, begins: bool) -> Any:
        if self.epoch is not None:
            return made(self.epoch)

        def from_position(epoch: Epoch) -> Any:
            return made(replace(epoch, readings=Readings(self.skipped(epoch.batch))))

        self.outside += [flow.dataset for flow in (self, *self.parts) if flow.dataset is not None]
        return in_epochs(self.place, from_position, begins=begins, outside=self.outside)

    def call(self, function: StageFunction, draws: str) -> None:
        """Adds a function to the map that calls those which draw by one key."""
        if self._draws != draws:
            self._end_map()
        self._functions.append(function)
        self._draws = draws

    def call_with_many(self, function: StageFunction, size: int) -> None:
        """Adds a function to the map that takes so many examples at once, and makes single ones of them again."""
        if self._at_once is None or self.check is not None:
            self._end_map()
        self._functions.append(function)
        self._at_once = size

    @property
    def waits(self) -> bool:
        """Whether the last thing that waits is a map of single examples."""
        return self._at_once is None and (bool(self._functions) or self.check is not None)

    def flush(self) -> Any:
        """Applies the maps that wait, and returns the dataset."""
        self.dataset = self.take_maps()(self.dataset)
        return self.dataset

    def take_maps(self, *, deterministic: bool | None = None) -> Callable[[Any], Any]:
        """Returns the maps that wait, as a function of a dataset, in place of applying them.

        Args:
            deterministic: Whether they keep the order. Default: as in the whole pipeline.
        """
        self._end_map()
        maps, self._maps = tuple(self._maps), []

        def mapped(dataset: Any) -> Any:
            for each in maps:
                dataset = each.apply(dataset, deterministic=deterministic)
            return dataset

        return mapped

    def _end_map(self) -> None:
        functions, is_raw = tuple(self._functions), self._is_raw and self._at_once is None
        if self._at_once is not None:
            self._maps.append(_MapChunks(functions, self._at_once, self))
            functions = ()
        if functions or self.check is not None:
            check = None if self.check is None else self.check.checker(is_raw=is_raw)
            self._maps.append(_Map(functions, self._draws, check, self))
        self._functions, self._draws, self._at_once, self.check = [], "", None, None
        self._is_raw = is_raw and not functions


@dataclass(frozen=True, slots=True)
class _Map:
    """A parallel map of single examples, or of batches."""

    functions: tuple[StageFunction, ...]
    draws: str  # by which key
    check: Callable[[Any, Any], Any] | None  # of an element before and after them
    flow: Flow

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        spec = dataset.element_spec

        def called(element: Any, bits: Any) -> Any:
            result = call_in_turn(self.functions, element, bits)
            return result if self.check is None else self.check(element, result)

        def unseeded(*arguments: Any) -> Any:
            return called(element_of(arguments, spec), None)

        elements, call = dataset, unseeded
        if any(function.seeded for function in self.functions):
            elements, call = self._with_bits(dataset), called
        result = elements.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=self._name)
        if self.draws != "crop" and not all(function.seeded for function in self.functions):
            # The planner has looked; tf.random.set_seed may have been called since.
            refuse_restarting(self._name, find_in_function(result._map_func.function))
        return result

    def _with_bits(self, dataset: Any) -> Any:
        if self.flow.is_served:
            return with_drawn_bits(dataset)
        epoch = self.flow.epoch
        if epoch is not None:
            return with_random_bits(dataset, epoch.key(self.draws), skipped=epoch.readings.skipped)
        draw, by_batch = Draw(self.draws), self.draws == "batch"

        def chunk(position: Position, number: int) -> Any:
            skipped = position.batch if by_batch else self.flow.skipped(position.batch)
            return bits_from(skipped + number * _BITS, _BITS, draw.key(position))

        bits = in_single_examples(in_chunks(self.flow.place, chunk, 2**40, begins=False))
        # The length of batches is known, and must stay so.
        bits = of_length(bits, int(tf.data.INFINITE_CARDINALITY)) if by_batch else bits
        return tf.data.Dataset.zip(dataset, bits)

    @property
    def _name(self) -> str:
        return _joined(self.functions) or "check"


@dataclass(frozen=True, slots=True)
class _MapChunks:
    """A parallel map of chunks, of which single examples are made again."""

    functions: tuple[StageFunction, ...]
    size: int
    flow: Flow

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        count = int(dataset.cardinality()) if tf.executing_eagerly() else -1
        chunks = in_batches(dataset, self.size, full=False)
        spec = chunks.element_spec

        def called(*chunk: Any) -> Any:
            return call_in_turn(self.functions, element_of(chunk, spec), None)

        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": deterministic}
        chunks = chunks.map(called, **parallel, name=_joined(self.functions))
        examples = in_single_examples(chunks, _joined(self.functions))
        if count < 0 or self.flow.has_begun:  # perhaps in the middle
            return examples
        return examples.apply(tf.data.experimental.assert_cardinality(count))


def _joined(functions: tuple[StageFunction, ...]) -> str:
    return "_and_".join(dict.fromkeys(function.stage for function in functions))
