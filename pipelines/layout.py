"""Decides which stages a pipeline has, in which order, and how each is set."""

from dataclasses import dataclass

from tfopt.errors import PipelineError
from tfopt.hardware import host
from tfopt.pipelines.elements import is_static
from tfopt.pipelines.options import PipelineOptions
from tfopt.pipelines.sampling import Sample, Shapes, Traced, mixed_shapes
from tfopt.pipelines.sources.source import Source

MIB = 2**20
CACHE_SHARE = 4  # the cache may take one part in so many of the memory that is free
# Fixed, not a share of the free memory: under a seed the order must not depend on what else runs.
SHUFFLE_MIB = 1024
SHUFFLE_UNKNOWN = 1_000_000  # elements at most where the count is unknown; the buffer's table is allocated at once
_SMALL_BYTES = 64  # below it the buffer's own entry, not the element, takes the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What was decided; `build` only follows it.

    Args:
        count: The number of examples, None where unknown or endless.
        infinite: Whether the source never ends.
        used: The number of examples to read, where those behind them would be dropped unread in every epoch.
        cached: Whether the transformed examples are cached in memory.
        cache_reason: Why.
        shuffle_buffer: How many elements the shuffle draws from; 0 for no shuffle.
        shuffle_first: Whether it stands before `decode`, on the smaller raw elements.
        shuffle_reason: Why.
        batch_first: Whether indices are batched and whole batches gathered.
        augment_decodes: Whether `decode` runs in the same function as `augment`.
        takes_seed: Whether `augment` gets a seed.
        guard: Shapes that are checked in the graph, None where they are known.
        static_batch: Whether all batches are full.
        deterministic: Whether elements keep their order in parallel stages.
    """

    count: int | None
    infinite: bool
    used: int | None
    cached: bool
    cache_reason: str
    shuffle_buffer: int
    shuffle_first: bool
    shuffle_reason: str
    batch_first: bool
    augment_decodes: bool
    takes_seed: bool
    guard: Shapes | None
    static_batch: bool
    deterministic: bool

    def steps(self, options: PipelineOptions) -> int | None:
        """The number of batches an epoch, None where unknown or endless."""
        if self.count is None:
            return None
        rounded_up = options.remainder == "keep" and self.count % options.batch_size > 0
        return self.count // options.batch_size + rounded_up


def lay_out(
    source: Source, options: PipelineOptions, traced: Traced, sample: Sample, *, count: int | None, infinite: bool
) -> Layout:
    """Decides.

    Raises:
        PipelineError: No batch could be filled, or examples have unlike shapes.
        ValueError: cache="memory" for an endless source.
    """
    _expect_a_step(source, options, count)
    cached, cache_reason = decide_cache(
        options,
        count=count,
        infinite=infinite,
        example_bytes=sample.example_bytes,
        resident=source.resident,
        doubt=_doubt(traced),
    )
    buffer, shuffle_reason, shuffle_first = _shuffle(source, options, sample, count, cached)
    guard = _guard(options, traced, sample)
    ordered_first = not cached and (shuffle_first or not options.shuffle)
    gathers = source.resident and source.decode is not None and options.transform is None and ordered_first
    drops_tail = options.remainder == "drop" and not options.shuffle and count is not None
    return Layout(
        count=count,
        infinite=infinite,
        # Unread, the tail would also keep the cache from ever being complete.
        used=count - count % options.batch_size if drops_tail and count is not None else None,
        cached=cached,
        cache_reason=cache_reason,
        shuffle_buffer=buffer,
        shuffle_first=shuffle_first,
        shuffle_reason=shuffle_reason,
        batch_first=gathers and options.augment is None,
        augment_decodes=gathers and options.augment is not None and guard is None,
        takes_seed=traced.takes_seed,
        guard=guard,
        static_batch=options.remainder == "drop" or (count is not None and count % options.batch_size == 0),
        deterministic=options.seed is not None or not options.training or not options.shuffle,
    )


def decide_cache(
    options: PipelineOptions, *, count: int | None, infinite: bool, example_bytes: float, resident: bool, doubt: str
) -> tuple[bool, str]:
    """Returns whether to cache the transformed examples in memory, and why.

    Args:
        options: The pipeline's options.
        count: How many examples there are, None where unknown.
        infinite: Whether the source never ends.
        example_bytes: The mean size of a sampled example behind `transform`.
        resident: Whether the examples lie in memory already.
        doubt: Why what stands before the cache may give another result later, "" for no doubt.

    Raises:
        ValueError: cache="memory" for an endless source.
    """
    if options.cache is None:
        return False, "cache=None"
    if infinite:
        if options.cache == "memory":
            raise ValueError("cache='memory' expects data that ends. The source is endless: pass cache=None.")
        return False, "the source is endless"
    needed = "of unknown size" if count is None else _readable(count * example_bytes)
    if options.cache == "memory":
        return True, f"asked for; {needed}"
    if resident and options.transform is None:
        return False, "it would save nothing: the examples lie in memory, and nothing is computed"
    if count is None:
        return False, "the number of examples is unknown"
    if doubt:
        return False, doubt
    return _fits(count * example_bytes / MIB, needed)


def shuffle_buffer(count: int | None, element_bytes: float, *, shared: bool) -> tuple[int, str]:
    """Returns how many elements the shuffle draws from, and why.

    Args:
        count: How many elements there are, None where unknown.
        element_bytes: Their mean size where they are shuffled.
        shared: Whether the elements lie in the pipeline's cache anyway, so that the buffer holds nothing more.
    """
    if shared and count is not None:
        return count, "all examples: the cache holds them anyway"
    room = max(1, int(SHUFFLE_MIB * MIB / max(element_bytes, 1)))
    if count is not None and count <= room:
        return count, f"all elements: {_readable(count * element_bytes)}, within the {SHUFFLE_MIB:,} MiB for it"
    held = f"of {_readable(element_bytes)} each, as many as {SHUFFLE_MIB:,} MiB hold"
    if count is None:
        limit = min(room, SHUFFLE_UNKNOWN)
        return limit, f"elements {held}, at most {SHUFFLE_UNKNOWN:,}; the number of examples is unknown"
    return room, f"{room:,} of {count:,} elements {held}: elements far apart are not mixed"


def _expect_a_step(source: Source, options: PipelineOptions, count: int | None) -> None:
    if count is not None and options.remainder == "drop" and count < options.batch_size:
        raise PipelineError(
            f"Expected at least batch_size={options.batch_size} examples with remainder='drop'. {source.name} has "
            f"{count}: there would be zero steps. Pass a smaller batch_size, or remainder='keep'."
        )


def _doubt(traced: Traced) -> str:
    doubts = {
        "opaque": "calls Python, which may be random; cache='memory' says that it is not",
        "reading": "reads a variable, which may change; cache='memory' says that it does not",
    }
    findings = traced.in_source + traced.in_transform
    return next((f"{found} {doubts[found.kind]}" for found in findings if found.kind in doubts), "")


def _shuffle(
    source: Source, options: PipelineOptions, sample: Sample, count: int | None, cached: bool
) -> tuple[int, str, bool]:
    """Returns the buffer, the reason, and whether to shuffle raw elements."""
    if not options.shuffle:
        return 0, "shuffle=False" if options.training else "training=False keeps the order", False
    works = source.decode is not None or options.transform is not None
    first = not cached and works and sample.raw_bytes <= max(sample.example_bytes, _SMALL_BYTES)
    # Whether cache="auto" caches depends on the memory that is free: under a seed the buffer must not follow it.
    certain = options.seed is None or options.cache == "memory"
    size = sample.example_bytes if cached and certain else min(sample.raw_bytes, sample.example_bytes)
    buffer, reason = shuffle_buffer(count, size, shared=cached and certain)
    return buffer, reason + ("; before reading, where elements are smallest" if first else ""), first


def _guard(options: PipelineOptions, traced: Traced, sample: Sample) -> Shapes | None:
    """Returns the shapes to check in the graph."""
    if is_static(traced.examples.element_spec):
        return None
    # `augment` may bring images of any size to one, as a random crop does.
    if options.augment is not None and is_static(traced.augmented.element_spec):
        return None
    if sample.unlike() is not None:
        raise mixed_shapes(sample)
    return sample.shapes[0]


def _fits(needed_mib: float, needed: str) -> tuple[bool, str]:
    free_mib = host().memory_available_mib
    if free_mib is None:
        return False, f"{needed}; the free memory of this machine is unknown"
    if needed_mib > free_mib / CACHE_SHARE:
        return False, f"{needed} exceed a quarter of the {free_mib:,.0f} MiB of free memory"
    return True, f"{needed}, within a quarter of the {free_mib:,.0f} MiB of free memory"


def _readable(size: float) -> str:
    for unit, limit in (("B", 1), ("KiB", 1024), ("MiB", MIB)):
        if size < 1024 * limit:
            return f"{size / limit:,.0f} B" if unit == "B" else f"{size / limit:,.1f} {unit}"
    return f"{size / 1024 / MIB:,.1f} GiB"
