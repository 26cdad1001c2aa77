"""Decides which stages a pipeline has, in which order, and how each is set."""

import math
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.hardware import host
from tfopt.pipelines.caching import MIB, CacheChoice, Facts, decide_cache, readable
from tfopt.pipelines.device import choose_device
from tfopt.pipelines.device_jit import find_obstacles
from tfopt.pipelines.device_room import OnDevice, beside_auto, is_gpu, on_asked_device
from tfopt.pipelines.keys import with_key
from tfopt.pipelines.sampling import Sample, Shapes, Traced, mixed_shapes
from tfopt.pipelines.service.parts import Part
from tfopt.pipelines.shared.elements import is_static, leaves
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions
from tfopt.pipelines.sources.source import Source

AHEAD_MIB = 1024  # for batches prepared ahead; tf.data would take half of the memory
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
        cache: Where examples are cached.
        key: The name of a cache on disk, None where there is none.
        sample: What the sampled elements showed.
        cache_limit_bytes: What all caches in its folder may take together, None for no limit.
        shuffle_buffer: How many elements the shuffle draws from; 0 for no shuffle.
        shuffle_first: Whether it stands before `decode`, on the smaller raw elements.
        shuffle_reason: Why.
        mixing_buffer: How many raw elements are shuffled once, before a cache on disk; 0 for none.
        crop_encoded: Whether the crop decodes the image, in place of `decode`.
        batch_first: Whether indices are batched and whole batches gathered.
        augment_decodes: Whether `decode` runs in the same function as the first function of `augment`.
        guard: Shapes that are checked in the graph, None where they are known.
        static_batch: Whether all batches are full as they leave the batch stage.
        deterministic: Whether elements keep their order in parallel stages.
        device: The device that batches are copied to ahead of use, None for none.
        device_reason: Why.
        on_device: Where all examples lie on the device, for `tfopt.fit.overlap`; a text says why they do not, None
            where there was no question.
        threads: How many threads tf.data may use, None for its own choice.
        ahead_mib: What batches prepared ahead may take.
        served: What the plan says of the tf.data service, None where there is none.
        part: What this process reads of the source, where several train on a tf.data service; else None. `count` is
            that of the part.
        memory_mib: What the pipeline takes in memory at most: cache, shuffle and batches ahead; None where unknown.
    """

    count: int | None
    infinite: bool
    used: int | None
    cache: CacheChoice
    key: str | None
    sample: Sample
    cache_limit_bytes: int | None
    shuffle_buffer: int
    shuffle_first: bool
    shuffle_reason: str
    mixing_buffer: int
    crop_encoded: bool
    batch_first: bool
    augment_decodes: bool
    guard: Shapes | None
    static_batch: bool
    deterministic: bool
    device: str | None
    device_reason: str
    on_device: OnDevice | str | None
    threads: int | None
    ahead_mib: int
    served: str | None
    part: Part | None
    memory_mib: float | None

    def steps(self, options: PipelineOptions) -> int | None:
        """The number of batches an epoch, None where unknown or endless."""
        if self.part is not None:
            return self.part.steps
        if self.count is None:
            return None
        rounded_up = options.remainder != "drop" and self.count % options.batch_size > 0
        return self.count // options.batch_size + rounded_up


def lay_out(
    source: Source,
    options: PipelineOptions,
    traced: Traced,
    sample: Sample,
    *,
    count: int | None,
    infinite: bool,
    served: str | None,
    part: Part | None,
) -> Layout:
    """Returns the layout of a pipeline.

    Raises:
        PipelineError: No batch could be filled, or examples have unlike shapes.
        ValueError: A cache for an endless source, behind a random crop, or on disk where its content cannot be
            fingerprinted; or a device that is not there, or that cannot hold such examples.
        UnsupportedError: A cache on the device under a distribution strategy.
    """
    if part is None:  # which has steps
        _expect_a_step(source, options, count)
    facts = Facts(count=count, infinite=infinite, resident=source.resident, doubt=_doubt(traced), sample=sample)
    guard = _guard(options, traced, sample)
    device, device_reason, on_device = _devices(options, facts, traced, guard)
    if isinstance(on_device, OnDevice) and on_device.only:
        cache, key = CacheChoice("device", "transform", on_device.reason, on_device.bytes), None
    else:
        cache, key = with_key(source, options, decide_cache(options, facts), traced, sample, count=count)
    crops = options.crop is not None
    buffer, shuffle_reason, shuffle_first = _shuffle(source, options, sample, count, cache)
    ordered_first = cache.on is None and (shuffle_first or not options.shuffle)
    plain = source.resident and source.decode is not None and options.transform is None and not crops
    gathers = plain and ordered_first
    by_example = [function for function in options.augmentations if not isinstance(function, PerBatch)]
    drops_tail = options.remainder == "drop" and not options.shuffle and count is not None
    batch_mib = options.batch_size * sample.example_bytes / MIB
    ahead_mib = max(AHEAD_MIB, math.ceil(8 * batch_mib))
    mixing = shuffle_buffer(count, sample.raw_bytes, shared=False)[0] if key and options.shuffle else 0
    return Layout(
        count=count,
        infinite=infinite,
        # Unread, the tail would also keep the cache from ever being complete.
        used=count - count % options.batch_size if drops_tail and count is not None and served is None else None,
        cache=cache,
        key=key,
        sample=sample,
        cache_limit_bytes=None if options.cache_limit_gib is None else int(options.cache_limit_gib * 2**30),
        shuffle_buffer=buffer,
        shuffle_first=shuffle_first,
        shuffle_reason=shuffle_reason,
        mixing_buffer=mixing,
        crop_encoded=crops and source.encoded is not None and not _cropped_behind_cache(options, cache),
        batch_first=gathers and not by_example,
        augment_decodes=gathers and bool(by_example) and guard is None,
        guard=guard,
        # The same in all processes: their steps are traced alike.
        static_batch=options.remainder == "drop"
        or (part is None and count is not None and count % options.batch_size == 0),
        # A cache on disk goes on with the source where it ends: both need one order.
        deterministic=served is None
        and (options.seed is not None or not options.training or not options.shuffle or key is not None),
        device=device,
        device_reason=device_reason,
        on_device=on_device,
        threads=_threads(),
        ahead_mib=ahead_mib,
        served=served,
        part=part,
        memory_mib=_memory_mib(sample, cache, buffer, shuffle_first, mixing, ahead_mib),
    )


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
        return count, f"all elements: {readable(count * element_bytes)}, within the {SHUFFLE_MIB:,} MiB for it"
    held = f"of {readable(element_bytes)} each, as many as {SHUFFLE_MIB:,} MiB hold"
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
    source: Source, options: PipelineOptions, sample: Sample, count: int | None, cache: CacheChoice
) -> tuple[int, str, bool]:
    """Returns the buffer, the reason, and whether to shuffle raw elements."""
    if not options.shuffle:
        return 0, "shuffle=False" if options.training else "training=False keeps the order", False
    works = source.decode is not None or options.transform is not None or options.crop is not None
    # A random crop takes its seed from the example's place in the epoch: it stands behind the shuffle in any case.
    random_crop = options.crop is not None and options.crop.random
    sizes = (sample.raw_bytes,) if random_crop else (sample.raw_bytes, sample.decoded_bytes, sample.example_bytes)
    smallest = min(sizes)
    first = cache.on is None and works and (random_crop or sample.raw_bytes <= max(sample.example_bytes, _SMALL_BYTES))
    cached_bytes = sample.example_bytes if cache.after == "transform" else sample.decoded_bytes
    if cache.on == "device":
        return count or 0, "their numbers: each epoch one permutation of all examples, drawn at once", False
    # Whether and where cache="auto" caches depends on free memory and on times: under a seed the buffer must not.
    certain = options.seed is None or options.cache not in ("auto", None)
    size = cached_bytes if cache.on is not None and certain else smallest
    buffer, reason = shuffle_buffer(count, size, shared=cache.on == "memory" and certain)
    return buffer, reason + ("; before decoding, where elements are smallest" if first else ""), first


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


def _devices(
    options: PipelineOptions, facts: Facts, traced: Traced, guard: Shapes | None
) -> tuple[str | None, str, OnDevice | str | None]:
    """Returns the device that batches are copied to, why, and whether all examples lie there."""
    spec = traced.examples.element_spec
    if options.on_device:
        held = on_asked_device(options, facts, spec)
        held = replace(held, obstacles=find_obstacles(options, _full_batch(spec, guard, options.batch_size)))
        return held.device, "the examples lie there, and batches are made there", held
    device, reason = choose_device(options.device, traced.augmented.element_spec)
    asks = options.cache == "auto" and is_gpu(device)
    return device, reason, beside_auto(options, facts, spec, device) if asks else None


def _full_batch(spec: Any, guard: Shapes | None, batch_size: int) -> Any:
    """The element spec of a full batch of examples whose shapes were sampled."""
    shapes = [leaf.shape for leaf in leaves(spec)] if guard is None else guard
    specs = [
        tf.TensorSpec((batch_size, *(shape or ())), leaf.dtype)
        for leaf, shape in zip(leaves(spec), shapes, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, specs)


def _cropped_behind_cache(options: PipelineOptions, cache: CacheChoice) -> bool:
    return options.crop is not None and options.crop.random and cache.on is not None


def _threads() -> int | None:
    """The CPUs that a container may use, where TensorFlow would start a thread for each that it sees."""
    machine = host()
    allowed = math.ceil(machine.cpus)
    return allowed if allowed < len(machine.affinity) else None


def _memory_mib(
    sample: Sample, cache: CacheChoice, buffer: int, shuffle_first: bool, mixing: int, ahead_mib: int
) -> float | None:
    if cache.on == "memory" and cache.bytes is None:
        return None
    # What lies on the device is gathered in host memory first.
    cached = cache.bytes / MIB if cache.on in ("memory", "device") and cache.bytes is not None else 0.0
    element = sample.raw_bytes if shuffle_first else max(sample.decoded_bytes, sample.example_bytes)
    shuffled = 0.0 if cache.on in ("memory", "device") else buffer * max(element, _SMALL_BYTES) / MIB
    mixed = mixing * max(sample.raw_bytes, _SMALL_BYTES) / MIB
    return cached + shuffled + mixed + ahead_mib
