"""A stage of a plan, and the dataset that goes through the stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.sample import ShapeCheck
from tfopt.pipelines.shared.elements import element_of, in_single_examples
from tfopt.pipelines.shared.nondeterminism import find_in_function, refuse_restarting
from tfopt.pipelines.shared.options import StageFunction
from tfopt.pipelines.shared.position import FIRST, START, Position, Turn
from tfopt.pipelines.shared.seeding import call_in_turn, in_batches, part_seed, with_drawn_bits, with_random_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline, as the plan prints it and `build` applies it."""

    # "read", "mix", "decode", "crop", "transform", "cache", "shuffle", "augment", "batch", "gather" (on the device),
    # "service", "pad", "prefetch", "device", "overlap", "order" or "memory"
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


@dataclass(frozen=True, slots=True)
class MapGroup:
    """Functions that one parallel map calls: those of neighbouring stages with equal groups."""

    part: str  # of the pipeline: "crop", "augment", or "batch" for functions of whole batches
    seed: int | None  # the pipeline's
    served: bool = False  # whether they run on the workers of a tf.data service


@dataclass(slots=True)
class Flow:
    """A dataset on its way through the stages."""

    description: str  # of the whole plan; a cache on disk keeps it for its readers
    dataset: Any = None
    position: Position = START  # where the finished dataset begins
    turn: Turn = FIRST  # what the stages leave out for that
    parts: list["Flow"] = field(default_factory=list)  # of a mixture, each up to its cache
    settings: Any = field(default_factory=tf.data.Options)
    # Called with the finished batches and the settings, in turn: nothing may follow a copy to the device.
    endings: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    check: ShapeCheck | None = None  # what the next map ends with
    _functions: list[StageFunction] = field(default_factory=list)  # of the next map
    _group: MapGroup | None = None  # of these
    _at_once: int | None = None  # how many examples these take, if not one
    _maps: list["_Map | _MapChunks"] = field(default_factory=list)  # those that wait
    _is_raw: bool = True
    _decided: bool = False  # whether `decide_order` has been called

    def branch(self, turn: Turn) -> "Flow":
        """Returns a flow that goes on from here."""
        return Flow(self.description, self.flush(), turn=turn, parts=self.parts, _is_raw=self._is_raw)

    def decide_order(self) -> Turn:
        """Returns what the stage that decides the order leaves out and repeats; nothing for those after it."""
        turn, self._decided = FIRST if self._decided else self.turn, True
        return turn

    def call(self, function: StageFunction, group: MapGroup) -> None:
        """Adds a function to the map that calls its group."""
        if self._group != group:
            self._end_map()
        self._functions.append(function)
        self._group = group

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
            self._maps.append(_MapChunks(functions, self._at_once))
            functions = ()
        if functions or self.check is not None:
            check = None if self.check is None else self.check.checker(is_raw=is_raw)
            self._maps.append(_Map(functions, self._group, check, self.turn))
        self._functions, self._group, self._at_once, self.check = [], None, None, None
        self._is_raw = is_raw and not functions


@dataclass(frozen=True, slots=True)
class _Map:
    """A parallel map of single examples, or of batches."""

    functions: tuple[StageFunction, ...]
    group: MapGroup | None
    check: Callable[[Any, Any], Any] | None  # of an element before and after them
    turn: Turn

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        group, spec = self.group, dataset.element_spec

        def called(element: Any, bits: Any) -> Any:
            result = call_in_turn(self.functions, element, bits)
            return result if self.check is None else self.check(element, result)

        def unseeded(*arguments: Any) -> Any:
            return called(element_of(arguments, spec), None)

        elements, call = dataset, unseeded
        if group is not None and any(function.seeded for function in self.functions):
            elements, call = self._with_bits(dataset, group), called
        result = elements.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=self._name)
        if group is not None and group.part != "crop" and not all(function.seeded for function in self.functions):
            # The planner has looked; tf.random.set_seed may have been called since.
            refuse_restarting(self._name, find_in_function(result._map_func.function))
        return result

    def _with_bits(self, dataset: Any, group: MapGroup) -> Any:
        if group.served:
            return with_drawn_bits(dataset)
        seed, turn, by_batch = part_seed(group.seed, group.part), self.turn, group.part == "batch"
        skipped = turn.batches if by_batch else turn.examples
        return with_random_bits(dataset, seed, opened=turn.opened, skipped=skipped, once=by_batch)

    @property
    def _name(self) -> str:
        return _joined(self.functions) or "check"


@dataclass(frozen=True, slots=True)
class _MapChunks:
    """A parallel map of chunks, of which single examples are made again."""

    functions: tuple[StageFunction, ...]
    size: int

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        count = int(dataset.cardinality()) if tf.executing_eagerly() else -1
        chunks = in_batches(dataset, self.size, full=False)
        spec = chunks.element_spec

        def called(*chunk: Any) -> Any:
            return call_in_turn(self.functions, element_of(chunk, spec), None)

        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": deterministic}
        chunks = chunks.map(called, **parallel, name=_joined(self.functions))
        examples = in_single_examples(chunks, _joined(self.functions))
        return examples.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else examples


def _joined(functions: tuple[StageFunction, ...]) -> str:
    return "_and_".join(dict.fromkeys(function.stage for function in functions))
