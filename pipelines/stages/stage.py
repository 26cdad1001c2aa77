"""A stage of a plan, and the dataset that goes through the stages."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.sample import ShapeCheck
from tfopt.pipelines.shared.elements import element_of, in_single_examples
from tfopt.pipelines.shared.epochs import Epoch, Place, Readings
from tfopt.pipelines.shared.nondeterminism import find_in_function, refuse_restarting
from tfopt.pipelines.shared.options import StageFunction
from tfopt.pipelines.shared.seeding import call_in_turn, in_batches, with_drawn_bits, with_random_bits


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
    """A dataset on its way through the stages, outside of the epochs and then in each."""

    description: str  # of the whole plan; a cache on disk keeps it for its readers
    place: Place  # of the whole dataset
    number: int | None = None  # of the part of a mixture
    dataset: Any = None
    epoch: Epoch | None = None  # within one; None before, and where a tf.data service makes its own
    parts: list["Flow"] = field(default_factory=list)  # of a mixture, each up to its cache
    settings: Any = field(default_factory=tf.data.Options)
    outside: list[Any] = field(default_factory=list)  # datasets that epochs read, and do not make
    # Called with the finished batches and the settings, in turn: nothing may follow a copy to the device.
    endings: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    check: ShapeCheck | None = None  # what the next map ends with
    _functions: list[StageFunction] = field(default_factory=list)  # of the next map
    _draws: str = ""  # by which key these draw
    _at_once: int | None = None  # how many examples these take, if not one
    _maps: list["_Map | _MapChunks"] = field(default_factory=list)  # those that wait
    _is_raw: bool = True
    _readings: Readings = field(default_factory=Readings)  # of the stage that decides the order
    _early: Any = 0  # examples that are left out there
    _late: Any = 0  # and behind the last function of many examples at once
    _chunks: int = 0  # such functions that are to come

    def begin(
        self, epoch: Epoch | None, stages: Sequence[Stage], examples: Any = 0, *, times: int = 1, count: int = 0
    ) -> "Flow":
        """Returns a flow that goes on from here through an epoch.

        Args:
            epoch: The epoch.
            stages: Those that follow in it.
            examples: How many are left out at first.
            times: How often the epoch reads them.
            count: How many there are, if it reads them several times.
        """
        chunks = [stage for stage in stages if stage.at_once > 1]
        # No chunk is cut, since kernels may round otherwise in another.
        late = examples % chunks[0].at_once if chunks and epoch is not None else 0
        early = examples - late
        whole = early // count if times > 1 else 0
        return Flow(
            description=self.description,
            place=self.place,
            number=self.number,
            dataset=self.flush(),
            epoch=epoch,
            parts=self.parts,
            settings=self.settings,
            outside=self.outside,
            endings=self.endings,
            _is_raw=self._is_raw,
            _readings=Readings(times, whole, early - whole * count),
            _early=early,
            _late=late,
            _chunks=len(chunks),
        )

    @property
    def expected_epoch(self) -> Epoch:
        """The epoch, within one."""
        assert self.epoch is not None
        return self.epoch

    def take_readings(self) -> Readings:
        """Returns what the stage that decides the order leaves out and repeats; nothing for those after it."""
        taken, self._readings = self._readings, Readings()
        return taken

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
        self._chunks -= 1

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
            late = 0 if self._chunks else self._late
            self._maps.append(_MapChunks(functions, self._at_once, late))
            self._early, self._late, functions = self._early + late, self._late - late, ()
        if functions or self.check is not None:
            check = None if self.check is None else self.check.checker(is_raw=is_raw)
            self._maps.append(_Map(functions, self._draws, check, self.epoch, self._early))
        self._functions, self._draws, self._at_once, self.check = [], "", None, None
        self._is_raw = is_raw and not functions


@dataclass(frozen=True, slots=True)
class _Map:
    """A parallel map of single examples, or of batches."""

    functions: tuple[StageFunction, ...]
    draws: str  # by which key
    check: Callable[[Any, Any], Any] | None  # of an element before and after them
    epoch: Epoch | None
    skipped: Any  # examples that are left out of it

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
        if self.epoch is None:
            return with_drawn_bits(dataset)
        skipped = self.epoch.batch if self.draws == "batch" else self.skipped
        return with_random_bits(dataset, self.epoch.key(self.draws), skipped=skipped)

    @property
    def _name(self) -> str:
        return _joined(self.functions) or "check"


@dataclass(frozen=True, slots=True)
class _MapChunks:
    """A parallel map of chunks, of which single examples are made again."""

    functions: tuple[StageFunction, ...]
    size: int
    skipped: Any  # examples to leave out of what they give

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        count = int(dataset.cardinality()) if tf.executing_eagerly() else -1
        chunks = in_batches(dataset, self.size, full=False)
        spec = chunks.element_spec

        def called(*chunk: Any) -> Any:
            return call_in_turn(self.functions, element_of(chunk, spec), None)

        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": deterministic}
        chunks = chunks.map(called, **parallel, name=_joined(self.functions))
        examples = in_single_examples(chunks, _joined(self.functions))
        examples = examples.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else examples
        return Readings(rest=self.skipped).without_rest(examples)


def _joined(functions: tuple[StageFunction, ...]) -> str:
    return "_and_".join(dict.fromkeys(function.stage for function in functions))
