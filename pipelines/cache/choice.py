"""Decides where examples are cached, on what, and why."""

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines.cache.cached_dataset import Cached
from tfopt.pipelines.cache.folder import default_folder, free_bytes, read_index
from tfopt.pipelines.cache.rows import Rows
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.device.placing import OnDevice
from tfopt.pipelines.inspection.facts import MIB, Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.text import readable_bytes

_MEMORY_SHARE = 4  # a cache may take a quarter of the free memory
_DISK_SHARE = 2  # and with cache="auto" half of the free disk
_DISK_MIB_PER_SECOND = 500  # a plain SATA SSD; slower disks are not worth caching on

_CLEARLY = 3  # times faster must reading be
_PROBE_MIB = 32
_PROBED = 1024  # examples, if so many fit; the sampled ones are repeated
_PROBES = 3  # passes
_LONG_SECONDS = 0.3  # to compute the sampled examples once
_PROBE_KEY = "tfopt-" + "0" * 64

After = Literal["decode", "transform"]


@dataclass(frozen=True, slots=True)
class CacheChoice:
    """Where examples are cached, and why."""

    on: str | None  # "memory", "device", the path of a folder, or None for no cache
    after: After  # the last stage before the cache
    reason: str
    bytes: float | None = None  # its size; None if unknown, or without a cache
    folder: Path | None = field(init=False)  # of a cache on disk

    def __post_init__(self) -> None:
        on_disk = self.on not in (None, "memory", "device")
        object.__setattr__(self, "folder", Path(str(self.on)) if on_disk else None)


def choose_cache(
    options: PipelineOptions, facts: Facts, held: OnDevice | str | None, taken_bytes: float = 0
) -> CacheChoice:
    """Returns where to cache, and why; refuses a cache of an endless source, or one that freezes a random crop.

    `held` is that of the pipeline's `Placement`; `taken_bytes` of memory are for other caches of the same pipeline.
    """
    if isinstance(held, OnDevice) and held.only:
        return CacheChoice("device", "transform", held.reason, held.bytes)
    places = _places(options)

    def no(reason: str) -> CacheChoice:
        return CacheChoice(None, places[0], reason)

    if options.cache is None:
        return no("cache=None")
    if options.balance is not None:
        return no("`balance` reads some examples more often than others")
    if options.service is not None:
        return no("the service's workers divide the examples differently in each epoch")
    if facts.infinite:
        if options.cache != "auto":
            raise ValueError(f"cache={options.cache!r} expects data that ends. The source is endless: pass cache=None.")
        return no("the source is endless")
    if options.cache != "auto":
        after = _steady_place(places, facts)
        size = _size(after, facts)
        return CacheChoice(str(options.cache), after, f"asked for; {_needed(size)}", size)
    if _saves_nothing(options, facts):
        nothing = "it would save nothing: rows are read where they lie, and nothing is computed"
        if not facts.source.resident:
            nothing = "it would save nothing: rows are read in pools, faster than one by one from a cache"
        return no(nothing + (" before the crop" if options.crop is not None else ""))
    if facts.count is None:
        return no("the number of examples is unknown")
    if facts.doubt:
        return no(facts.doubt)
    in_memory = [_in_memory(after, facts, taken_bytes) for after in places if _worth_caching(after, options, facts)]
    if not in_memory:
        return no("it would save less than half of the work, the part before `transform`")
    fitting = [choice for choice in in_memory if choice.on]
    return fitting[0] if fitting else _on_disk(options, facts, in_memory[0])


def reads_by_position(options: PipelineOptions, facts: Facts) -> bool:
    """Whether the source's elements are read in a permutation of all of them, in place of a buffer that mixes them."""
    if facts.source.at is None or facts.count is None:
        return False
    return bool(options.shuffle) and options.service is None


def reads_in_pools(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> bool:
    """Whether the source's elements are read in pools that are shuffled as a whole, in place of a buffer."""
    if facts.source.pools is None or facts.count is None or options.service is not None:
        return False
    return bool(options.shuffle) and not keeps_one_order(options, facts, cache)


def keeps_one_order(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> bool:
    """Whether elements are read in the same random order in each epoch, and shuffled again from the second one on.

    So are those that a cache holds. Under a seed, the order must be the same where cache="auto" finds no memory.
    """
    if not options.shuffle or cache.on is not None:
        by_position = cache.on == "device" or (cache.folder is not None and reads_by_position(options, facts))
        return bool(options.shuffle) and not by_position
    if options.cache != "auto" or options.seed is None or options.service is not None or options.balance is not None:
        return False
    return facts.count is not None and not facts.infinite and not facts.doubt and not _saves_nothing(options, facts)


def _saves_nothing(options: PipelineOptions, facts: Facts) -> bool:
    """Whether a cache would hold what lies in memory anyway, or what is read in pools."""
    at_hand = facts.source.resident or facts.source.pools is not None
    return at_hand and (options.transform is None or _places(options) == ("decode",))


def _places(options: PipelineOptions) -> tuple[After, ...]:
    """The stages a cache may follow, the one that saves most first."""
    random_crop = options.crop is not None and options.crop.random
    if random_crop and options.cache_after == "transform":
        raise ValueError(
            "Expected nothing random before the cache. cache_after='transform' would freeze the random crop, which "
            "comes before `transform`. Pass cache_after='decode', or CentralCrop."
        )
    if random_crop or options.transform is None:
        return ("decode",)
    return ("transform", "decode") if options.cache_after == "auto" else (options.cache_after,)


def _steady_place(places: tuple[After, ...], facts: Facts) -> After:
    """Where a requested cache stands: by sizes alone, since measured times could move it on the next run."""
    larger = facts.sample.example_bytes > 2 * facts.sample.decoded_bytes
    return places[-1] if larger and not facts.source.resident else places[0]


def _worth_caching(after: After, options: PipelineOptions, facts: Facts) -> bool:
    if after == "transform" or options.transform is None or options.cache_after == "decode":
        return True
    return facts.sample.decode_seconds >= facts.sample.transform_seconds and not facts.source.resident


def _in_memory(after: After, facts: Facts, taken_bytes: float) -> CacheChoice:
    size = _size(after, facts)
    free_mib = host().memory_available_mib
    if size is None or free_mib is None:
        return CacheChoice(None, after, f"{_needed(size)}; the free memory of this machine is unknown", size)
    share = f"a quarter of the {free_mib:,.0f} MiB of free memory"
    share += f", of which other parts take {readable_bytes(taken_bytes)}" if taken_bytes else ""
    if (size + taken_bytes) / MIB > free_mib / _MEMORY_SHARE:
        return CacheChoice(None, after, f"{_needed(size)} exceed {share}", size)
    return CacheChoice("memory", after, f"{_needed(size)}, within {share}", size)


def _on_disk(options: PipelineOptions, facts: Facts, refused: CacheChoice) -> CacheChoice:
    """A cache in the default folder if reading it is faster than the work it saves, and there is room."""

    def no(reason: str) -> CacheChoice:
        return CacheChoice(None, refused.after, f"{refused.reason}; {reason}")

    if options.seed is not None:
        return no("on disk only if `cache` names a folder, so that the order under a seed does not depend on memory")
    after = _steady_place(_places(options), facts)
    size = _size(after, facts)
    if size is None:
        return no("their size is unknown")
    folder = default_folder()
    room = free_bytes(folder) / _DISK_SHARE
    if options.cache_limit_gib is not None:
        room = min(room, options.cache_limit_gib * 1024 * MIB)
    if size > room:
        return no(f"on disk they exceed the {readable_bytes(room)} that they may take in {folder}")
    each = size / (facts.count or 1)
    # A probe that was just written is read from memory: the disk itself bounds how fast a large cache is read.
    computed, read = facts.sample.seconds(after) / host().cpus, each / (_DISK_MIB_PER_SECOND * MIB)
    if computed >= _CLEARLY * read:
        try:
            examples = facts.traced.examples if after == "transform" else facts.traced.decoded
            probed, again = _probe(folder, examples, each)
        except (OSError, ValueError, tf.errors.OpError) as error:
            return no(f"writing the sampled examples to {folder} failed ({type(error).__name__}: {error})")
        computed, read = min(computed, again / host().cpus), max(read, probed)
    computed_ms, read_ms = 1000 * computed, 1000 * read
    if computed < _CLEARLY * read:
        return no(f"on disk it would hardly pay: {computed_ms:.2g} ms to compute one, {read_ms:.2g} ms to read it")
    return CacheChoice(
        str(folder),
        after,
        f"{refused.reason}; from disk one is read in about {read_ms:.2g} ms and computed in {computed_ms:.2g} ms, as "
        "measured on sampled examples",
        size,
    )


def _probe(folder: Path, examples: Any, each_bytes: float) -> tuple[float, float]:
    """Returns the seconds to read one of the sampled examples from a cache in this folder, and to compute one.

    Raises OSError if the folder cannot be written.
    """
    fitting = int(_PROBE_MIB * MIB / max(each_bytes, 1))
    few = examples.take(max(1, fitting)).cache()  # computed once, and read many times
    count = sum(1 for _ in few)
    repeats = -(-min(max(fitting, 8), _PROBED) // count)
    folder.mkdir(parents=True, exist_ok=True)
    # Named as what a killed writer leaves, which `clear_cache` removes, should this process be killed.
    with tempfile.TemporaryDirectory(prefix=_PROBE_KEY + ".writing-", dir=folder, ignore_cleanup_errors=True) as path:
        total = count * repeats
        store = Store(
            Path(path), lambda: _PROBE_KEY, count=total, expected_bytes=None, limit_bytes=None, what="a probe"
        )
        examples_again = few.repeat(repeats)
        probe = Cached(store, examples_again, None, lambda elements: elements, Rows(few.element_spec), total, total)
        dataset = probe.in_order(lambda made: made(None), lambda elements, _: elements)
        _seconds_each(dataset, total)
        if read_index(store.path) is None:
            raise OSError(f"{path} could not be written")
        one_by_one = tf.data.Options()
        one_by_one.experimental_optimization.map_parallelization = False
        one_by_one.autotune.enabled = False
        again = examples.repeat().with_options(one_by_one)
        started = time.perf_counter()
        sum(1 for _ in again.take(count))
        # Handing examples to Python takes longer than computing cheap ones: those are computed again, many at a time.
        cheap = time.perf_counter() - started < _LONG_SECONDS
        reads, computes = [], []
        for _ in range(_PROBES):
            reads.append(_seconds_each(dataset, total))
            computes.append(_seconds_each(again.take(_PROBED), _PROBED) if cheap else float("inf"))
    # Reading runs ahead, and may so seem short; what else the machine does only adds to computing.
    return statistics.median(reads), min(computes)


def _seconds_each(examples: Any, count: int) -> float:
    """Returns the processor's time per example of a pass over them, without that to start it.

    Unlike the clock's, it hardly depends on what else the machine does.
    """
    part = max(1, count // 8)  # batches of numbers: examples may differ in shape, and Python would take longer
    times = [time.process_time() for _ in examples.map(lambda *_: 0).batch(part)]
    return (times[-1] - times[0]) / max(1, count - part)


def _size(after: After, facts: Facts) -> float | None:
    each = facts.sample.example_bytes if after == "transform" else facts.sample.decoded_bytes
    return None if facts.count is None else facts.count * each


def _needed(size: float | None) -> str:
    return "of unknown size" if size is None else readable_bytes(size)
