"""Describes a layout for the reader: the stages in order, each with its setting and its reason."""

from dataclasses import dataclass
from typing import Any

from tfopt.pipelines.layout import Layout
from tfopt.pipelines.options import PipelineOptions, function_name
from tfopt.pipelines.sources.source import Source

_CLASSES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Args:
        name: What it does: "read", "decode", "transform", "cache", "shuffle", "augment", "batch", "prefetch", "order".
        setting: How it is set.
        reason: Why.
    """

    name: str
    setting: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        """Returns the stage as JSON values."""
        return {"name": self.name, "setting": self.setting, "reason": self.reason}


def describe(source: Source, options: PipelineOptions, layout: Layout) -> tuple[Stage, ...]:
    """Returns the stages in the order in which elements pass them; "order", last, holds for all of them."""
    shuffle = _shuffle(layout)
    first = [_read(source, options, layout), *([shuffle] if layout.shuffle_first else [])]
    work = _work(source, options, layout)
    if not layout.shuffle_first:
        work.insert(_place_of_shuffle(work), shuffle)
    last = [_batch(options, layout)]
    if layout.batch_first:
        last.append(Stage("gather", "whole batches", "rows in memory need no work one by one"))
    return (*first, *work, *last, _prefetch(options), _order(options, layout))


def table(stages: tuple[Stage, ...]) -> str:
    """Returns the stages as lines of aligned columns."""
    widths = [max(len(getattr(stage, column)) for stage in stages) for column in ("name", "setting")]
    return "\n".join(f"  {s.name:<{widths[0]}}  {s.setting:<{widths[1]}}  {s.reason}" for s in stages)


def _read(source: Source, options: PipelineOptions, layout: Layout) -> Stage:
    if layout.infinite:
        return Stage("read", source.name, "endless: give fit its steps_per_epoch")
    if layout.count is None and not options.training:
        return Stage("read", source.name, "number of examples unknown")
    if layout.count is None:
        return Stage(
            "read",
            source.name,
            "number of examples unknown: Keras' fit counts one optimizer iteration too many at the end of each epoch, "
            "which shifts Adam's bias correction and schedules; where you know the number, use "
            "tf.data.experimental.assert_cardinality or Source(count=...)",
        )
    reason = f"{layout.count:,} examples{_classes(source.class_names)}"
    if layout.used is not None and layout.used < layout.count:
        reason += f"; the last {layout.count - layout.used} fill no batch and are not read"
    if options.shuffle and source.shuffled is not None:
        reason += "; files shuffled and read side by side"
    return Stage("read", source.name, reason)


def _classes(names: tuple[str, ...] | None) -> str:
    if not names:
        return ""
    shown = names if len(names) <= _CLASSES_SHOWN else (*names[: _CLASSES_SHOWN - 1], "…", names[-1])
    return f" of {len(names):,} class{'es' * (len(names) > 1)}: {', '.join(shown)}"


def _work(source: Source, options: PipelineOptions, layout: Layout) -> list[Stage]:
    """The stages between reading and batching, without the shuffle."""
    guard = "" if layout.guard is None else f"; shapes checked: {', '.join(map(str, layout.guard))}"
    stages = []
    if source.decode is not None and not layout.batch_first:
        stages.append(
            Stage("decode", "parallel", "as many calls at once as pay" + ("" if options.transform else guard))
        )
    if options.transform is not None:
        stages.append(Stage("transform", function_name(options.transform), "deterministic, parallel" + guard))
    stages.append(Stage("cache", "memory" if layout.cached else "none", layout.cache_reason))
    if options.augment is not None:
        seeds = (
            "a fresh seed for each element of each epoch"
            if layout.takes_seed
            else "drawn from TensorFlow's own random state"
        )
        when = "" if options.training else "; runs with training=False too"
        stages.append(
            Stage("augment", function_name(options.augment), f"run anew in each epoch, parallel; {seeds}{when}")
        )
    return stages


def _place_of_shuffle(work: list[Stage]) -> int:
    return next(index for index, stage in enumerate(work) if stage.name == "cache") + 1


def _shuffle(layout: Layout) -> Stage:
    setting = f"buffer of {layout.shuffle_buffer:,}" if layout.shuffle_buffer else "none"
    return Stage("shuffle", setting, layout.shuffle_reason)


def _batch(options: PipelineOptions, layout: Layout) -> Stage:
    if options.remainder == "drop":
        reason = "remainder='drop': every batch is full, and its shape static"
    elif layout.static_batch:
        reason = "every batch is full, and its shape static: the size divides the number of examples"
    else:
        reason = "remainder='keep': every example is used, the last batch may be smaller"
    steps = layout.steps(options)
    return Stage("batch", f"{options.batch_size:,}", reason + ("" if steps is None else f"; {steps:,} steps an epoch"))


def _prefetch(options: PipelineOptions) -> Stage:
    if options.prefetch == "auto":
        return Stage("prefetch", "auto", "tf.data sets how many batches it prepares ahead")
    return Stage("prefetch", f"{options.prefetch} batches", "asked for")


def _order(options: PipelineOptions, layout: Layout) -> Stage:
    if not layout.deterministic:
        return Stage("order", "free", "shuffled without a seed: no element waits for a slower one")
    if options.seed is not None:
        return Stage("order", f"seed {options.seed}", "the same elements, order and augmentation on every run")
    return Stage("order", "kept", "training=False" if not options.training else "shuffle=False")


def summary(source: Source, options: PipelineOptions, layout: Layout) -> dict[str, Any]:
    """Returns what a layout amounts to, as JSON values."""
    return {
        "source": source.name,
        "count": layout.count,
        "steps_per_epoch": layout.steps(options),
        "cached": layout.cached,
        "shuffle_buffer": layout.shuffle_buffer,
        "deterministic": layout.deterministic,
    }
