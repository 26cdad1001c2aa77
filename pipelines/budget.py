"""What may be held in memory: the cache and the shuffle buffer."""

from tfopt.hardware import host
from tfopt.pipelines.options import PipelineOptions

MIB = 2**20
CACHE_SHARE = 4  # the cache may take one part in so many of the memory that is free
# Fixed, not a share of the free memory: under a seed the order must not depend on what else runs.
SHUFFLE_MIB = 1024
SHUFFLE_UNKNOWN = 1_000_000  # elements at most where the count is unknown; the buffer's table is allocated at once


def decide_cache(
    options: PipelineOptions, *, count: int | None, infinite: bool, example_bytes: float, resident: bool, opaque: str
) -> tuple[bool, str]:
    """Returns whether to cache the transformed examples in memory, and why.

    Args:
        options: The pipeline's options.
        count: How many examples there are, None where unknown.
        infinite: Whether the source never ends.
        example_bytes: The mean size of a sampled example behind `transform`.
        resident: Whether the examples lie in memory already.
        opaque: The operation before the cache that calls Python, "" for none.

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
    if opaque:
        return False, f"{opaque} calls Python, which may be random; cache='memory' says that it is not"
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
