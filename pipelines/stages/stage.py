"""A stage of a plan, and the dataset that goes through the stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.facts import ShapeCheck
from tfopt.pipelines.shared.elements import element_of, without_autograph
from tfopt.pipelines.shared.nondeterminism import find_in_function, refuse_restarting
from tfopt.pipelines.shared.options import StageFunction
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

    def to_dict(self) -> dict[str, str]:
        """Returns the stage's line in the plan as JSON values."""
        return {"name": self.name, "setting": self.setting, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class MapGroup:
    """Functions that one parallel map calls: those of neighbouring stages with equal groups."""

    part: str  # of the pipeline: "crop"; "augment" or "batch" for functions of `augment`
    seed: int | None  # the pipeline's
    served: bool = False  # whether they run on the workers of a tf.data service


@dataclass(frozen=True, slots=True)
class DecodeChunks:
    """A source's `decode_batch`, for examples that are to be single ones again."""

    decode: Callable[..., Any]
    size: int  # examples that are decoded at once

    def apply(self, dataset: Any, *, deterministic: bool | None) -> Any:
        """Returns the dataset of examples."""
        count = int(dataset.cardinality())
        chunks = in_batches(dataset, self.size, full=False)
        parallel = {"num_parallel_calls": tf.data.AUTOTUNE, "deterministic": deterministic}
        chunks = chunks.map(self.decode, **parallel, name="decode")
        examples = chunks.flat_map(_slices(chunks.element_spec))
        return examples.apply(tf.data.experimental.assert_cardinality(count)) if count >= 0 else examples


@dataclass(slots=True)
class Flow:
    """A dataset on its way through the stages."""

    description: str  # of the whole plan; a cache on disk keeps it for its readers
    dataset: Any = None
    settings: Any = field(default_factory=tf.data.Options)
    # Called with the finished batches and the settings, in turn: nothing may follow a copy to the device.
    endings: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    check: ShapeCheck | None = None  # what the next map ends with
    chunks: DecodeChunks | None = None  # what the next map begins with
    _functions: list[StageFunction] = field(default_factory=list)
    _group: MapGroup | None = None
    _is_raw: bool = True

    def call(self, function: StageFunction, group: MapGroup) -> None:
        """Adds a function to the map that calls its group."""
        if self._group != group:
            self.flush()
        self._functions.append(function)
        self._group = group

    @property
    def maps(self) -> bool:
        """Whether a map of single examples waits."""
        return bool(self._functions) or self.check is not None

    def flush(self) -> Any:
        """Applies the map that waits, and returns the dataset."""
        augments = self._group is not None and self._group.part != "crop"
        draws = augments and not all(each.seeded for each in self._functions)
        self.dataset = self.take_map()(self.dataset)
        if draws:
            # The planner has looked; tf.random.set_seed may have been called since.
            refuse_restarting("augment", find_in_function(self.dataset._map_func.function))
        return self.dataset

    def take_map(self, *, deterministic: bool | None = None) -> Callable[[Any], Any]:
        """Returns the map that waits, as a function of a dataset, in place of applying it.

        Args:
            deterministic: Whether it keeps the order. Default: as in the whole pipeline.
        """
        group, functions, chunks = self._group, tuple(self._functions), self.chunks
        is_raw = self._is_raw and chunks is None
        check = None if self.check is None else self.check.checker(is_raw=is_raw)
        self._functions, self._group, self.check, self.chunks = [], None, None, None
        self._is_raw = is_raw and not functions
        name = "_and_".join(dict.fromkeys(function.stage for function in functions)) or "check"

        def called(element: Any, bits: Any) -> Any:
            result = call_in_turn(functions, element, bits)
            return result if check is None else check(element, result)

        def mapped(dataset: Any) -> Any:
            if chunks is not None:
                dataset = chunks.apply(dataset, deterministic=deterministic)
            if not functions and check is None:
                return dataset
            spec = dataset.element_spec

            def unseeded(*arguments: Any) -> Any:
                return called(element_of(arguments, spec), None)

            elements, call = dataset, unseeded
            if group is not None and any(function.seeded for function in functions):
                seed = part_seed(group.seed, group.part)
                elements = with_drawn_bits(dataset) if group.served else with_random_bits(dataset, seed)
                call = called
            return elements.map(call, num_parallel_calls=tf.data.AUTOTUNE, deterministic=deterministic, name=name)

        return mapped


def _slices(spec: Any) -> Callable[..., Any]:
    """Returns a function of a batch, as a dataset of this spec spreads it, that gives the dataset of its examples."""

    @without_autograph
    def sliced(*batch: Any) -> Any:
        return tf.data.Dataset.from_tensor_slices(element_of(batch, spec))

    return sliced
