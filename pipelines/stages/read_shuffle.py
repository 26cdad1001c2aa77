"""Reads the source's raw elements, mixes them once before a cache on disk, and shuffles them in each epoch."""

from dataclasses import dataclass

import tensorflow as tf

from tfopt.pipelines.cache.choice import MIB, CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed, shuffle
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.stage import Flow, Stage
from tfopt.text import readable_bytes

_CLASSES_SHOWN = 8
# Fixed, not a share of the free memory: under a seed the order must not depend on what else runs.
SHUFFLE_MIB = 1024
_MOST_UNKNOWN = 1_000_000  # elements if the count is unknown; the buffer's table is allocated at once
SMALL_BYTES = 64  # below this, the buffer's own entry takes the memory rather than the element


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(Stage):
    """Shuffles raw elements or examples."""

    buffer: int  # how many elements it draws from; 0 for no shuffle
    first: bool  # whether it comes before decoding, on raw elements
    seed: int | None
    on_device: bool  # whether the device shuffles indices instead
    served: bool  # whether it runs on the workers of a tf.data service

    def apply(self, flow: Flow) -> None:
        """Shuffles, differently on every iteration."""
        if self.buffer and not self.on_device:
            flow.dataset = shuffle(flow.flush(), self.buffer, self.seed, redraw=self.served)

    def summary(self) -> dict[str, object]:
        """Returns the buffer's size."""
        return {"shuffle_buffer": self.buffer}


def plan_reading(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> list[Stage]:
    """Returns the stage "read", and "mix" before a cache on disk that is shuffled."""
    source, count = facts.source, facts.count
    # What is cached on disk has one order: mixed well once, and shuffled again after the cache.
    on_disk = cache.folder is not None
    seed = part_seed(options.seed or 0, "mix") if on_disk else part_seed(options.seed, "files")
    used = facts.used
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


def plan_shuffle(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> Shuffle:
    """Returns the stage "shuffle"; without a shuffle, it says so."""
    buffer, reason, first = _decide_shuffle(options, facts, cache)
    held = "all" if cache.on == "device" else "buffer of"
    return Shuffle(
        name="shuffle",
        setting=f"{held} {buffer:,}" if buffer else "none",
        reason=reason,
        buffer=buffer,
        first=first,
        seed=part_seed(options.seed, "shuffle"),
        on_device=cache.on == "device",
        served=options.service is not None,
    )


def fitting_buffer(count: int | None, element_bytes: float, *, shared: bool) -> tuple[int, str]:
    """Returns how many elements the shuffle draws from, and why.

    Args:
        count: How many elements there are, None if unknown.
        element_bytes: Their mean size where they are shuffled.
        shared: Whether the pipeline's cache holds the elements anyway, so that the buffer takes no memory.
    """
    if shared and count is not None:
        return count, "all examples: the cache holds them anyway"
    room = max(1, int(SHUFFLE_MIB * MIB / max(element_bytes, 1)))
    if count is not None and count <= room:
        return count, f"all elements: {readable_bytes(count * element_bytes)}, within the {SHUFFLE_MIB:,} MiB for it"
    held = f"of {readable_bytes(element_bytes)} each, as many as {SHUFFLE_MIB:,} MiB hold"
    if count is None:
        limit = min(room, _MOST_UNKNOWN)
        return limit, f"elements {held}, at most {_MOST_UNKNOWN:,}; the number of examples is unknown"
    return room, f"{room:,} of {count:,} elements {held}: elements far apart are not mixed"


def _decide_shuffle(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> tuple[int, str, bool]:
    """Returns the buffer, the reason, and whether to shuffle raw elements."""
    source, sample = facts.source, facts.sample
    if not options.shuffle:
        return 0, "shuffle=False" if options.training else "training=False keeps the order", False
    if cache.on == "device":
        return facts.count or 0, "indices: each epoch is one permutation of all examples, drawn at once", False
    works = source.decode is not None or options.transform is not None or options.crop is not None
    # A random crop takes its seed from the example's place in the epoch, so it follows the shuffle in any case.
    random_crop = options.crop is not None and options.crop.random
    sizes = (sample.raw_bytes,) if random_crop else (sample.raw_bytes, sample.decoded_bytes, sample.example_bytes)
    first = cache.on is None and works and (random_crop or sample.raw_bytes <= max(sample.example_bytes, SMALL_BYTES))
    cached_bytes = sample.example_bytes if cache.after == "transform" else sample.decoded_bytes
    # Whether and where cache="auto" caches depends on free memory and on times: under a seed the buffer must not.
    certain = options.seed is None or options.cache not in ("auto", None)
    size = cached_bytes if cache.on is not None and certain else min(sizes)
    buffer, reason = fitting_buffer(facts.count, size, shared=cache.on == "memory" and certain)
    return buffer, reason + ("; before decoding, where elements are smallest" if first else ""), first


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
