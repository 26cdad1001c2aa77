"""Reads the source's raw elements, and mixes them once before a cache on disk."""

from dataclasses import dataclass

import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed, shuffle
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.shuffle import fitting_buffer
from tfopt.pipelines.stages.stage import Flow, Stage

_CLASSES_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Stage):
    """Reads raw elements."""

    source: Source
    count: int | None
    used: int | None  # how many to read
    shuffled: bool  # whether the source reads its parts in random order
    seed: int | None
    asserts: bool  # whether to assert the count of a dataset that does not know its own

    def apply(self, flow: Flow) -> None:
        """Starts the flow with the source's dataset."""
        source = self.source
        use_shuffled = self.shuffled and source.shuffled is not None
        dataset = source.shuffled(self.seed) if use_shuffled and source.shuffled else source.dataset()
        if self.asserts and self.count is not None and int(dataset.cardinality()) < 0:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.count))
        flow.dataset = dataset if self.used == self.count else dataset.take(self.used)

    def summary(self) -> dict[str, object]:
        """Returns the source's name and count."""
        return {"source": self.source.name, "count": self.count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Stage):
    """Shuffles raw elements once, into the one order of a cache on disk."""

    buffer: int
    seed: int | None

    def apply(self, flow: Flow) -> None:
        """Shuffles the elements in the same way on every iteration."""
        flow.dataset = shuffle(flow.dataset, self.buffer, self.seed, reshuffle=False)


def plan_reading(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> list[Stage]:
    """Returns the stage "read", and "mix" before a cache on disk that is shuffled."""
    source, count = facts.source, facts.count
    # What is cached on disk has one order: mixed well once, and shuffled again after the cache.
    on_disk = cache.folder is not None
    seed = part_seed(options.seed or 0, "mix") if on_disk else part_seed(options.seed, "files")
    used = facts.used(options)
    shuffled = bool(options.shuffle) and source.shuffled is not None
    read = Read(
        name="read",
        setting=source.name,
        reason=_reason(options, facts, used, shuffled=shuffled),
        source=source,
        count=count,
        used=used,
        shuffled=shuffled,
        seed=seed,
        asserts=options.service is None,
    )
    if not on_disk or not options.shuffle:
        return [read]
    buffer = fitting_buffer(count, facts.sample.raw_bytes, shared=False)[0]
    reason = "shuffled once, in the order of the cache"
    return [read, Mix(name="mix", setting=f"buffer of {buffer:,}", reason=reason, buffer=buffer, seed=seed)]


def _reason(options: PipelineOptions, facts: Facts, used: int | None, *, shuffled: bool) -> str:
    if facts.infinite:
        return "endless: give fit its steps_per_epoch"
    if facts.count is None and not options.training:
        return "number of examples unknown"
    if facts.count is None:
        return (
            "number of examples unknown: Keras' fit counts one optimizer iteration too many in each epoch "
            "(docs/sources.md); if you know it, use tf.data.experimental.assert_cardinality or Source(count=...)"
        )
    reason = f"{facts.count:,} examples{_classes(facts.source.class_names)}"
    if used is not None and used < facts.count:
        reason += f"; the last {facts.count - used} fill no batch and are not read"
    return reason + ("; shuffled part by part, and several parts read side by side" if shuffled else "")


def _classes(names: tuple[str, ...] | None) -> str:
    if not names:
        return ""
    shown = names if len(names) <= _CLASSES_SHOWN else (*names[: _CLASSES_SHOWN - 1], "…", names[-1])
    return f" of {len(names):,} class{'es' * (len(names) > 1)}: {', '.join(shown)}"
