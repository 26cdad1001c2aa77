"""A stage of a plan, and the dataset that goes through the stages."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.inspection.facts import Facts, refuse_restarting
from tfopt.pipelines.inspection.sampling import Shapes
from tfopt.pipelines.shared.elements import apply, is_static, leaves, without_autograph
from tfopt.pipelines.shared.functions import StageFunction, map_functions
from tfopt.pipelines.shared.nondeterminism import find_in_function
from tfopt.pipelines.shared.options import PipelineOptions


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

    seed: int | None
    augments: bool = False  # whether they are functions of `augment`
    served: bool = False  # whether they run on the workers of a tf.data service


@dataclass(frozen=True, slots=True)
class ShapeCheck:
    """Checks in the graph that examples have the shapes of the sampled ones."""

    shapes: Shapes
    source: str  # the source's name
    origin: Callable[..., Any] | None  # names a raw element

    def checker(self, *, is_raw: bool) -> Callable[[Any, Any], Any]:
        """Returns a function of an element before and after a map; `is_raw` says whether the former is a raw one."""
        origin = self.origin if is_raw else None

        @without_autograph
        def checked(before: Any, example: Any) -> Any:
            name = tf.constant(f"An element of {self.source}") if origin is None else apply(origin, before)
            pairs = zip(leaves(example), self.shapes, strict=True)
            fixed = [
                leaf if shape is None or leaf.shape.is_fully_defined() else _expect_shape(leaf, shape, name)
                for leaf, shape in pairs
            ]
            return tf.nest.pack_sequence_as(example, fixed)

        return checked


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

    def take_map(self, *, deterministic: bool | None = None) -> Callable[[Any], Any]:
        """Returns the map that waits, as a function of a dataset, in place of applying it."""
        group, functions = self._group or MapGroup(None), tuple(self._functions)
        check = None if self.check is None else self.check.checker(is_raw=self._is_raw)
        self._functions, self._group, self.check, self._is_raw = [], None, None, self._is_raw and not functions
        return partial(
            map_functions,
            functions=functions,
            seed=group.seed,
            deterministic=deterministic,
            check=check,
            served=group.served,
        )

    def flush(self) -> Any:
        """Applies the map that waits, and returns the dataset."""
        draws = self._group is not None and self._group.augments and not all(each.seeded for each in self._functions)
        self.dataset = self.take_map()(self.dataset)
        if draws:
            # The planner has looked; tf.random.set_seed may have been called since.
            refuse_restarting("augment", find_in_function(self.dataset._map_func.function))
        return self.dataset

    def finish(self) -> Any:
        """Returns the dataset of batches."""
        dataset = self.flush().with_options(self.settings)
        for ending in self.endings:
            dataset = ending(dataset, self.settings)
        return dataset


def shape_check(options: PipelineOptions, facts: Facts) -> ShapeCheck | None:
    """Returns the check of shapes that TensorFlow does not know; None if it knows them.

    Raises:
        PipelineError: If the sampled examples have different shapes.
    """
    traced = facts.traced
    if is_static(traced.examples.element_spec):
        return None
    # `augment` may bring images of any size to one, as a random crop does.
    if options.augmentations and is_static(traced.augmented.element_spec):
        return None
    return ShapeCheck(facts.sample.common_shapes(), facts.source.name, facts.source.origin)


@without_autograph
def _expect_shape(leaf: Any, shape: tuple[int, ...], name: Any) -> Any:
    """Gives a leaf this shape; one that has another shape at run time raises an error that names the example."""
    # Compared as text: shapes of different ranks cannot be compared element by element.
    found = tf.strings.reduce_join(tf.as_string(tf.shape(leaf)), separator=", ")
    expected = ", ".join(map(str, shape))
    remedy = f"), unlike the first, ({expected}). Bring all to one shape in `transform`."
    message = [name, " has shape (", found, remedy]
    with tf.control_dependencies([tf.debugging.Assert(tf.equal(found, expected), [tf.strings.join(message)])]):
        leaf = tf.identity(leaf)
    leaf.set_shape(shape)
    return leaf
