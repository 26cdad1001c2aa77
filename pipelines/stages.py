"""Describes a layout for the reader: the stages in order, each with its setting and its reason."""

from dataclasses import dataclass
from typing import Any

from tfopt.pipelines.device_room import OnDevice
from tfopt.pipelines.layout import Layout
from tfopt.pipelines.shared.last_batch import padding_note
from tfopt.pipelines.shared.options import PipelineOptions, function_name
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.steps import Step, augmentations, before_and_behind

_CLASSES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline.

    Args:
        name: What it does: "read", "mix", "decode", "crop", "transform", "cache", "shuffle", "augment", "batch",
            "gather", "service", "pad", "prefetch", "device", "overlap", "order", "memory".
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
    """Returns the stages in the order in which elements pass them; "order" and "memory", last, hold for all of them."""
    stages = [_read(source, options, layout)]
    before, behind = before_and_behind(source, options, layout)
    cached = layout.cache.on is not None
    if layout.mixing_buffer:
        stages.append(Stage("mix", f"buffer of {layout.mixing_buffer:,}", "shuffled once, in the order of the cache"))
    if layout.shuffle_first:
        stages.append(_shuffle(layout))
    if cached:
        stages += [_work(step, options, layout) for step in before]
        stages += [_cache(layout), _shuffle(layout)]
    if not layout.batch_first:
        stages += [_work(step, options, layout) for step in behind]
    if not cached:
        stages.append(_cache(layout))
        stages += [] if layout.shuffle_first else [_shuffle(layout)]
    stages += [_work(step, options, layout) for step in augmentations(options, by_batch=False)]
    stages += _batches(options, layout)
    stages += [_prefetch(options), _device(layout), *_overlap(layout), _order(options, layout), _memory(layout)]
    return tuple(stages)


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
            "number of examples unknown: Keras' fit counts one optimizer iteration too many in each epoch "
            "(docs/sources.md); if you know it, use tf.data.experimental.assert_cardinality or Source(count=...)",
        )
    reason = f"{layout.count:,} examples{_classes(source.class_names)}"
    if layout.used is not None and layout.used < layout.count:
        reason += f"; the last {layout.count - layout.used} fill no batch and are not read"
    if options.shuffle and source.shuffled is not None:
        reason += "; shuffled part by part, and several parts read side by side"
    return Stage("read", source.name, reason)


def _classes(names: tuple[str, ...] | None) -> str:
    if not names:
        return ""
    shown = names if len(names) <= _CLASSES_SHOWN else (*names[: _CLASSES_SHOWN - 1], "…", names[-1])
    return f" of {len(names):,} class{'es' * (len(names) > 1)}: {', '.join(shown)}"


def _work(step: Step, options: PipelineOptions, layout: Layout) -> Stage:
    if step.name == "decode":
        return Stage("decode", "parallel", "as many calls at once as pay")
    if step.name == "crop":
        return _crop(step, options, layout)
    name = function_name(step.function)
    if step.name == "transform":
        return Stage("transform", name, "deterministic, parallel")
    seeds = "; a fresh seed each time" if step.seeded else ""
    when = "" if options.training else "; runs with training=False too"
    return Stage("augment", name, f"run anew in each epoch, parallel{seeds}{when}")


def _crop(step: Step, options: PipelineOptions, layout: Layout) -> Stage:
    height, width = getattr(options.crop, "size", (0, 0))
    drawn = "drawn anew in each epoch" if step.seeded else "the same in every epoch"
    fused = "; of a JPEG only the crop is decoded" if layout.crop_encoded else ""
    return Stage("crop", f"{'random' if step.seeded else 'central'}, {height}×{width}", drawn + fused)


def _cache(layout: Layout) -> Stage:
    if layout.cache.folder is None:
        return Stage("cache", layout.cache.on or "none", layout.cache.reason)
    reason = f"{layout.cache.reason}; written in the first whole epoch, then read, by later runs too"
    return Stage("cache", str(layout.cache.folder / str(layout.key)[:14]) + "…", reason)


def _shuffle(layout: Layout) -> Stage:
    held = "all" if layout.cache.on == "device" else "buffer of"
    setting = f"{held} {layout.shuffle_buffer:,}" if layout.shuffle_buffer else "none"
    return Stage("shuffle", setting, layout.shuffle_reason)


def _batches(options: PipelineOptions, layout: Layout) -> list[Stage]:
    """The stages from the batch on that take whole batches."""
    if options.remainder == "drop":
        reason = "remainder='drop': every batch is full, and its shape static"
    elif layout.static_batch:
        reason = "every batch is full, and its shape static: the size divides the number of examples"
    elif options.remainder == "pad":
        reason = "remainder='pad': every example is used, a smaller last batch is filled"
    else:
        reason = "remainder='keep': every example is used, the last batch may be smaller"
    steps = layout.steps(options)
    reason += "" if steps is None else f"; {steps:,} steps an epoch"
    if layout.guard is not None:
        reason += f"; shapes checked: {', '.join(map(str, layout.guard))}"
    stages = [Stage("batch", f"{options.batch_size:,}", reason)]
    if layout.batch_first:
        stages.append(Stage("gather", "whole batches", "rows in memory need no work one by one"))
    if layout.served is not None:
        stages.append(Stage("service", str(options.service), layout.served))
    augmenting = augmentations(options, by_batch=True)
    if layout.cache.on == "device":
        stages.append(Stage("gather", "on the device", "by number, in a function of its own that XLA compiles"))
        stages += [_on_device(step, obstacle) for step, obstacle in zip(augmenting, _obstacles(layout), strict=True)]
    else:
        stages += [_work(step, options, layout) for step in augmenting]
    if options.remainder == "pad":
        stages.append(Stage("pad", f"to {options.batch_size:,}", padding_note()))
    return stages


def _prefetch(options: PipelineOptions) -> Stage:
    if options.prefetch == "auto":
        return Stage("prefetch", "auto", "tf.data sets how many batches it prepares ahead")
    return Stage("prefetch", f"{options.prefetch} batches", "asked for")


def _device(layout: Layout) -> Stage:
    return Stage("device", layout.device or "none", layout.device_reason)


def _obstacles(layout: Layout) -> tuple[str | None, ...]:
    return layout.on_device.obstacles if isinstance(layout.on_device, OnDevice) else ()


def _on_device(step: Step, obstacle: str | None) -> Stage:
    how = "compiled by XLA" if obstacle is None else f"without XLA: {obstacle}"
    seeds = "; a fresh seed for each batch" if step.seeded else ""
    return Stage("augment", function_name(step.function), f"whole batches on the device, {how}{seeds}")


def _overlap(layout: Layout) -> list[Stage]:
    """What `tfopt.fit.overlap` makes of the pipeline."""
    held = layout.on_device
    if held is None:
        return []
    if isinstance(held, str):
        return [Stage("overlap", "as above", f"the examples do not lie on the device: {held}")]
    if held.only:
        return [Stage("overlap", "needed", "tfopt.fit.overlap(model) makes the batches; without it `fit` is refused")]
    reason = f"with tfopt.fit.overlap the examples lie on {held.device}: {held.reason}; a plain `fit` goes as above"
    return [Stage("overlap", "on the device", reason)]


def _memory(layout: Layout) -> Stage:
    threads = "" if layout.threads is None else f"; {layout.threads} threads, as many as this container's CPUs"
    reason = f"cache, shuffle, and up to {layout.ahead_mib:,} MiB of batches ahead{threads}"
    return Stage("memory", "unknown" if layout.memory_mib is None else f"≤ {layout.memory_mib:,.0f} MiB", reason)


def _order(options: PipelineOptions, layout: Layout) -> Stage:
    if layout.served is not None:
        return Stage("order", "free", "the service's workers deliver as they go, another way on each run")
    if not layout.deterministic:
        return Stage("order", "free", "shuffled without a seed: no element waits for a slower one")
    if options.seed is not None:
        return Stage("order", f"seed {options.seed}", "the same elements, order and augmentation on every run")
    if not options.training or not options.shuffle:
        return Stage("order", "kept", "training=False" if not options.training else "shuffle=False")
    return Stage("order", "kept", "shuffled without a seed; what is cached on disk keeps one order before that")


def summary(source: Source, options: PipelineOptions, layout: Layout) -> dict[str, Any]:
    """Returns what a layout amounts to, as JSON values."""
    return {
        "source": source.name,
        "count": layout.count,
        "steps_per_epoch": layout.steps(options),
        "cache": layout.cache.on,
        "cache_after": layout.cache.after if layout.cache.on else None,
        "cache_key": layout.key,
        "shuffle_buffer": layout.shuffle_buffer,
        "deterministic": layout.deterministic,
        "service": options.service,
        "device": layout.device,
        "on_device": isinstance(layout.on_device, OnDevice),
        "memory_mib": layout.memory_mib,
    }
