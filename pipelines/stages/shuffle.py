"""Shuffles, where elements are smallest or behind the cache, from a buffer that fits into memory."""

from dataclasses import dataclass

from tfopt.pipelines.cache.choice import MIB, CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import part_seed, shuffle
from tfopt.pipelines.stages.stage import Flow, Stage
from tfopt.text import readable_bytes

# Fixed, not a share of the free memory: under a seed the order must not depend on what else runs.
SHUFFLE_MIB = 1024
_MOST_UNKNOWN = 1_000_000  # elements if the count is unknown; the buffer's table is allocated at once
SMALL_BYTES = 64  # below this, the buffer's own entry takes the memory rather than the element


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(Stage):
    """Shuffles raw elements or examples."""

    buffer: int  # how many elements it draws from; 0 for no shuffle
    first: bool  # whether it comes before decoding, on raw elements
    seed: int | None
    on_device: bool  # whether the device shuffles indices instead
    served: bool  # whether it runs on the workers of a tf.data service

    def apply(self, flow: Flow) -> None:
        """Shuffles anew on every iteration."""
        if self.buffer and not self.on_device:
            flow.dataset = shuffle(flow.flush(), self.buffer, self.seed, redraw=self.served)

    def summary(self) -> dict[str, object]:
        """Returns the buffer's size."""
        return {"shuffle_buffer": self.buffer}


def plan_shuffle(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> Shuffle:
    """Returns the stage "shuffle"; without a shuffle, it says so."""
    buffer, reason, first = _decide(options, facts, cache)
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


def _decide(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> tuple[int, str, bool]:
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
