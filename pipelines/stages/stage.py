"""A stage of a plan, and the dataset that goes through the stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.facts import ShapeCheck
from tfopt.pipelines.shared.elements import element_of
from tfopt.pipelines.shared.nondeterminism import find_in_function, refuse_restarting
from tfopt.pipelines.shared.options import StageFunction
from tfopt.pipelines.shared.seeding import call_in_turn, part_seed, with_drawn_bits, with_random_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of a pipeline, as the plan prints it and `build` applies it."""

    # "read", "mix", "decode", "crop", "transform", "cache", "shuffle", "augment", "batch", "gather", "service", "pad",
    # "prefetch", "device", "overlap", "order" or "memory"
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


@dataclass(slots=True)
class Flow:
    """A dataset on its way through the stages."""

    description: str  # of the whole plan; a cache on disk keeps it for its readers
    dataset: Any = None
    settings: Any = field(default_factory=tf.data.Options)
    # Called with the finished batches and the settings, in turn: nothing may follow a copy to the device.
    endings: list[Callable[[Any, Any], Any]] = field(default_factory=list)
    check: ShapeCheck | None = None  # what the next map ends with
    _functions: list[StageFunction] = field(default_factory=list)
    _group: MapGroup | None = None
    _is_raw: bool = True

    def call(self, function: StageFunction, group: MapGroup) -> None:
        """Adds a function to the map that calls its group."""
        if self._group != group:
            self.flush()
        self._functions.append(function)
        self._group = group

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
        group, functions = self._group, tuple(self._functions)
        check = None if self.check is None else self.check.checker(is_raw=self._is_raw)
        self._functions, self._group, self.check, self._is_raw = [], None, None, self._is_raw and not functions
        name = "_and_".join(dict.fromkeys(function.stage for function in functions)) or "check"

        def called(element: Any, bits: Any) -> Any:
            result = call_in_turn(functions, element, bits)
            return result if check is None else check(element, result)

        def mapped(dataset: Any) -> Any:
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
