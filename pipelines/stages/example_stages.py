"""The stages of single examples: read, mix, decode, crop, transform, cache, shuffle and augment."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.pipelines.cache.cached_dataset import cached
from tfopt.pipelines.cache.choice import CacheChoice, keeps_one_order, reads_by_position
from tfopt.pipelines.cache.key import cache_key, expect_one_order
from tfopt.pipelines.cache.store import Store
from tfopt.pipelines.device.device_stage import refusing
from tfopt.pipelines.inspection.facts import MIB, SHUFFLE_MIB, SHUFFLE_MOST, Facts, ShapeCheck
from tfopt.pipelines.shared.crop_elements import crop_example
from tfopt.pipelines.shared.options import PipelineOptions, StageFunction
from tfopt.pipelines.shared.seeding import in_turn, part_seed, permutation, sequence, shuffle
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.stage import Flow, MapGroup, Stage
from tfopt.text import readable_bytes

_CLASSES_SHOWN = 8
_MOST_UNKNOWN = 10_000  # elements if the count is unknown: the first batch waits for all of them
_CHUNK_BYTES = 2**20  # of examples that are decoded at once
_AT_ONCE_SECONDS = 0.1  # to compute the examples of a cache on disk that are written together
SMALL_BYTES = 64  # below this, the buffer's own entry takes the memory rather than the element


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Stage):
    """Reads raw elements."""

    source: Source
    count: int | None
    used: int | None  # how many to read
    shuffled: bool  # whether the source reads its parts in random order
    # The permutation it reads in, by position: another in "each" epoch, "one" for all, or one that is shuffled from the
    # second epoch on, as it would be "behind" a cache. "" for the source's own order.
    permuted: str
    seed: int | None
    local: bool  # whether it runs in this process, not on the workers of a tf.data service

    def apply(self, flow: Flow) -> None:
        """Starts the flow with the source's dataset."""
        source = self.source
        if self.permuted and source.at is not None:
            dataset = source.at(self._order())
        elif self.shuffled and source.shuffled is not None:
            dataset = source.shuffled(part_seed(self.seed, "files"))
        elif source.resident and source.at is not None and self.used is not None and self.local:
            flow.dataset = source.at(sequence(self.used))
            return
        else:
            dataset = source.dataset()
        if self.local and self.count is not None and int(dataset.cardinality()) < 0:
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.count))
        flow.dataset = dataset if self.used == self.count else dataset.take(self.used)

    def _order(self) -> Any:
        count = self.count or 0
        if self.permuted == "each":
            return permutation(count, part_seed(self.seed, "files"))
        order = permutation(count, part_seed(self.seed, "mix"), reshuffle=False)
        if self.permuted == "one":
            return order
        return in_turn(order, shuffle(order, count, part_seed(self.seed, "shuffle")))

    def summary(self) -> dict[str, object]:
        """Returns the source's name and count."""
        return {"source": self.source.name, "count": self.count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Stage):
    """Shuffles raw elements once, into the one order of a cache."""

    buffer: int
    seed: int | None

    def apply(self, flow: Flow) -> None:
        """Shuffles the elements in the same way on every iteration."""
        seed = part_seed(self.seed, "mix")
        flow.dataset = shuffle(flow.dataset, self.buffer, seed, reshuffle=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionStage(Stage):
    """Calls a function on each example, or on each batch; neighbours of one group share a map."""

    function: StageFunction
    group: MapGroup
    check: ShapeCheck | None = None  # of what it returns

    def apply(self, flow: Flow) -> None:
        """Adds the function to the map of its group."""
        flow.call(self.function, self.group)
        if self.check is not None:
            flow.check = self.check


@dataclass(frozen=True, slots=True, kw_only=True)
class ManyAtOnce(Stage):
    """Calls a function with many examples at once, and makes single ones of them again; neighbours share a map."""

    function: StageFunction
    single: Any  # the same for one example
    size: int
    check: ShapeCheck | None = None  # of the examples that it returns

    def apply(self, flow: Flow) -> None:
        """Adds the function to the map."""
        flow.call_with_many(self.function, self.size)
        if self.check is not None:
            flow.check = self.check

    def with_batches(self, options: PipelineOptions) -> FunctionStage:
        """Returns the stage that calls the function with the batches themselves."""
        return _stage(self.function, "whole batches", self.reason, MapGroup("batch", options.seed))

    def one_by_one(self, options: PipelineOptions) -> FunctionStage:
        """Returns the stage that calls the function with one example at a time."""
        group = MapGroup("crop", options.seed, served=options.service is not None)
        stage = _stage(StageFunction(self.name, self.single), "parallel", self.reason, group)
        return replace(stage, check=self.check)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache(Stage):
    """Caches the examples; without a cache, it says why there is none."""

    choice: CacheChoice
    key: str | None  # of a cache on disk, when it was planned
    options: PipelineOptions
    facts: Facts

    def apply(self, flow: Flow) -> None:
        """Reads the examples from the cache, or writes them to it on the way."""
        options, facts, choice = self.options, self.facts, self.choice
        if facts.raw_examples:  # else the last function checks them
            flow.check = facts.check
        if choice.on == "device":
            flow.dataset = refusing(flow.flush())
        elif choice.on == "memory":
            flow.dataset = flow.flush().cache()
        elif choice.folder is not None:
            prepare = flow.take_maps(deterministic=True)
            store = Store(
                choice.folder,
                # Not the planned key: the functions are traced now, and what they read may have changed since.
                partial(cache_key, options, facts, choice),
                count=facts.used,
                expected_bytes=None if choice.bytes is None else int(choice.bytes),
                limit_bytes=None if options.cache_limit_gib is None else int(options.cache_limit_gib * 2**30),
                what=flow.description,
            )
            saved = facts.sample.seconds(choice.after)
            # No batch waits for more examples than its own, or for more than a moment.
            at_once = max(options.batch_size, int(_AT_ONCE_SECONDS / max(saved, 1e-9)))
            spec = prepare(flow.dataset).element_spec
            flow.dataset = cached(store, spec, flow.dataset, prepare, at_once=at_once)

    def summary(self) -> dict[str, Any]:
        """Returns where the cache is, and its key."""
        choice = self.choice
        return {"cache": choice.on, "cache_after": choice.after if choice.on else None, "cache_key": self.key}

    @property
    def repeats_first_epoch(self) -> bool:
        """Whether a first epoch in the cache's own order would repeat that of the run that wrote it."""
        written = self.choice.folder is not None and self.key is not None and (self.choice.folder / self.key).is_dir()
        return written and self.options.seed is None

    def without(self) -> "Cache":
        """Returns the stage without a cache."""
        return replace(self, choice=replace(self.choice, on=None), key=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(Stage):
    """Shuffles raw elements or examples."""

    buffer: int  # how many elements it draws from; 0 for no shuffle
    first: bool  # whether it comes before decoding, on raw elements
    seed: int | None
    drawn: bool  # whether all indices are drawn at once instead, on the device or where the source is read
    rests: bool  # whether the first epoch keeps the order of the elements, which are shuffled as they come
    served: bool  # whether it runs on the workers of a tf.data service

    def apply(self, flow: Flow) -> None:
        """Shuffles, differently on every iteration."""
        if self.buffer and not self.drawn:
            seed = part_seed(self.seed, "shuffle")
            elements = flow.flush()
            shuffled = shuffle(elements, self.buffer, seed, redraw=self.served)
            flow.dataset = in_turn(elements, shuffled) if self.rests else shuffled

    def summary(self) -> dict[str, object]:
        """Returns the buffer's size."""
        return {"shuffle_buffer": self.buffer}


def plan_reading(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> list[Stage]:
    """Returns the stage "read", and "mix" before a cache that is shuffled."""
    source, count = facts.source, facts.count
    # What is cached on disk has one order, for later runs too.
    seed = options.seed or 0 if cache.folder is not None else options.seed
    permuted = ""
    if cache.on != "device" and reads_by_position(options, facts):
        uncached = "behind" if keeps_one_order(options, facts, cache) else "each"
        permuted = uncached if cache.on is None else "one"
    shuffled = bool(options.shuffle) and source.shuffled is not None and not permuted
    read = Read(
        name="read",
        setting=source.name,
        reason=_reason(options, facts, shuffled=shuffled),
        source=source,
        count=count,
        used=facts.used,
        shuffled=shuffled,
        permuted=permuted,
        seed=seed,
        local=options.service is None,
    )
    if permuted == "one":
        return [replace(read, reason=f"{read.reason}; in one random order, that of the cache, by their positions")]
    if not _mixes(options, facts, cache):
        return [read]
    buffer = fitting_buffer(count, facts.sample.raw_bytes, at_hand=source.is_at_hand)[0]
    reason = "shuffled once: the order of the first epoch, and of a cache"
    return [read, Mix(name="mix", setting=f"buffer of {buffer:,}", reason=reason, buffer=buffer, seed=seed)]


def plan_functions(
    options: PipelineOptions, facts: Facts, cache: CacheChoice
) -> tuple[list[FunctionStage | ManyAtOnce], list[FunctionStage | ManyAtOnce]]:
    """Returns the stages up to the cache, and those after it; all of them after it if there is none."""
    source, crop = facts.source, options.crop
    cached = cache.on is not None
    group = MapGroup("crop", options.seed, served=options.service is not None)
    # A crop after the cache cuts from whole decoded images.
    fused = crop is not None and source.encoded is not None and not (crop.random and cached)
    stages: list[FunctionStage | ManyAtOnce] = []
    decode = source.encoded if fused else source.decode
    if facts.by_batch and not fused and source.decode_batch is not None and decode is not None:
        function = StageFunction("decode", source.decode_batch, by_batch=True)
        stages.append(_many_at_once(function, decode, options, facts, "quicker than one by one"))
    elif decode is not None:
        function = StageFunction("decode", decode)
        stages.append(_stage(function, "parallel", "as many calls at once as pay", group))
    at = len(stages)
    if crop is not None:
        call = partial(crop_example, crop=crop, crop_with=options.crops_with, only_jpeg=source.only_jpeg)
        function = StageFunction("crop", call, crop.random)
        height, width = getattr(crop, "size", (0, 0))
        setting = f"{'random' if crop.random else 'central'}, {height}×{width}"
        reason = "drawn again in each epoch" if crop.random else "the same in every epoch"
        moved = ", ".join(sorted(name for name, moves in options.crops_with.items() if moves))
        reason += f"; cropped with the image: {moved}" if moved else ""
        reason += "; of a JPEG only the crop is decoded" if fused else ""
        stages.append(_stage(function, setting, reason, group))
        at += not crop.random
    transform = options.transformation
    if transform is not None and transform.by_batch:
        reason = f"{transform.name}, deterministic, parallel"
        stages.append(_many_at_once(transform, _alone(transform.call), options, facts, reason))
    elif transform is not None:
        stages.append(_stage(transform, transform.name, "deterministic, parallel", group))
    if stages:
        stages[-1] = replace(stages[-1], check=facts.check)
    if not cached:
        at = 0
    elif cache.after == "transform":
        at = len(stages)
    return stages[:at], stages[at:]


def plan_cache(options: PipelineOptions, facts: Facts, choice: CacheChoice) -> Cache:
    """Returns the stage "cache".

    With cache="auto", what cannot be fingerprinted is not cached, and the reason says so.

    Raises:
        ValueError: If a cache on disk was asked for whose content has no fixed order or no fingerprint.
    """
    key = None
    if choice.folder is not None:
        try:
            expect_one_order(facts)
            key = cache_key(options, facts, choice)
        except ValueError as error:
            if options.cache_folder is not None:
                raise
            choice = replace(choice, on=None, reason=f"{choice.reason}, but: {error}")
    setting, reason = choice.on or "none", choice.reason
    if key is not None:
        setting = f"{choice.folder}/{key[:14]}…"
        reason += "; written in the first whole epoch, then read, by later runs too"
    return Cache(name="cache", setting=setting, reason=reason, choice=choice, key=key, options=options, facts=facts)


def plan_shuffle(options: PipelineOptions, facts: Facts, cache: Cache) -> Shuffle:
    """Returns the stage "shuffle"; without a shuffle, it says so."""
    choice = cache.choice
    rests = _rests(options, facts, choice) and not cache.repeats_first_epoch
    buffer, reason, first = _decide_shuffle(options, facts, choice)
    reason += "; the first epoch comes in the order of the mix" if rests else ""
    drawn = choice.on == "device" or (choice.on is None and reads_by_position(options, facts))
    held = "all" if drawn else "buffer of"
    return Shuffle(
        name="shuffle",
        setting=f"{held} {buffer:,}" if buffer else "none",
        reason=reason,
        buffer=buffer,
        first=first,
        seed=options.seed,
        drawn=drawn,
        rests=rests,
        served=options.service is not None,
    )


def fitting_buffer(
    count: int | None, element_bytes: float, *, shared: bool = False, at_hand: bool = False
) -> tuple[int, str]:
    """Returns how many of `count` elements the shuffle draws from, and why.

    The first batch of each epoch waits until they are read. `shared` says that the pipeline's cache holds the elements
    anyway, so that the buffer takes no memory; `at_hand`, that reading them takes no time.
    """
    if shared and count is not None:
        return count, "all examples: the cache holds them anyway"
    room = max(1, int(SHUFFLE_MIB * MIB / max(element_bytes, 1)))
    if not at_hand and count is not None and min(count, room) > SHUFFLE_MOST:
        return (
            SHUFFLE_MOST,
            f"{SHUFFLE_MOST:,} of {count:,} elements: the first batch waits for them; others far apart are not mixed",
        )
    if count is not None and count <= room:
        return count, f"all elements: {readable_bytes(count * element_bytes)}, within the {SHUFFLE_MIB:,} MiB for it"
    held = f"of {readable_bytes(element_bytes)} each, as many as {SHUFFLE_MIB:,} MiB hold"
    if count is None:
        limit = min(room, _MOST_UNKNOWN)
        return limit, f"elements {held}, at most {_MOST_UNKNOWN:,}; the number of examples is unknown"
    return room, f"{room:,} of {count:,} elements {held}: elements far apart are not mixed"


def plan_augment(options: PipelineOptions, *, by_batch: bool) -> list[FunctionStage]:
    """Returns the stages "augment" of functions that take single examples, or of those that take batches."""
    served = options.service is not None and not by_batch
    group = MapGroup("batch" if by_batch else "augment", options.seed, served=served)
    when = "" if options.training else "; runs with training=False too"
    return [
        _stage(
            function,
            function.name,
            f"runs again in each epoch, parallel{'; a fresh seed each time' if function.seeded else ''}{when}",
            group,
        )
        for function in options.augmentations
        if function.by_batch is by_batch
    ]


def _decide_shuffle(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> tuple[int, str, bool]:
    """Returns the buffer, the reason, and whether to shuffle raw elements."""
    sample = facts.sample
    if not options.shuffle:
        return 0, "shuffle=False" if options.training else "training=False keeps the order", False
    if cache.on == "device":
        return facts.count or 0, "indices: each epoch is one permutation of all examples, drawn at once", False
    permuted = reads_by_position(options, facts)
    if cache.on is None and permuted:
        reason = "each epoch is one permutation of all examples, drawn at once (8 bytes each), and read by position"
        return facts.count or 0, reason, True
    # A random crop takes its seed from the example's place in the epoch, so it follows the shuffle in any case.
    random_crop = options.crop is not None and options.crop.random
    sizes = (sample.raw_bytes,) if random_crop else (sample.raw_bytes, sample.decoded_bytes, sample.example_bytes)
    smaller = random_crop or sample.raw_bytes <= max(sample.example_bytes, SMALL_BYTES)
    # Whole batches are decoded only if nothing comes between them and the shuffle.
    many = facts.by_batch or (options.transformation is not None and options.transformation.by_batch)
    first = cache.on is None and not facts.raw_examples and (smaller or many)
    cached_bytes = sample.example_bytes if cache.after == "transform" else sample.decoded_bytes
    # Whether and where cache="auto" caches depends on free memory and on times: under a seed the buffer must not.
    certain = options.seed is None or options.cache not in ("auto", None)
    size = cached_bytes if cache.on is not None and certain else sample.raw_bytes if first and certain else min(sizes)
    shared = cache.on == "memory" and (certain or permuted)
    buffer, reason = fitting_buffer(facts.count, size, shared=shared, at_hand=facts.source.is_at_hand)
    reason += "; before decoding" if first else ""
    return buffer, reason + (", where elements are smallest" if first and smaller else ""), first


def _mixes(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> bool:
    """Whether a buffer of raw elements mixes them into the one order that they keep."""
    if reads_by_position(options, facts) or not keeps_one_order(options, facts, cache):
        return False
    # If the source itself computes the examples, they are waited for whether they are mixed before a cache or after it.
    return cache.folder is not None or not facts.raw_examples


def _rests(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> bool:
    """Whether the first epoch needs no shuffle, since its elements come in a random order of their own."""
    permuted = cache.on is not None and reads_by_position(options, facts)
    return keeps_one_order(options, facts, cache) and (permuted or _mixes(options, facts, cache))


def _reason(options: PipelineOptions, facts: Facts, *, shuffled: bool) -> str:
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
    if facts.used is not None and facts.used < facts.count:
        reason += f"; the last {facts.count - facts.used} fill no batch and are not read"
    reason += f"; {facts.source.note}" if facts.source.note else ""
    return reason + ("; shuffled part by part, and several parts read side by side" if shuffled else "")


def _classes(names: tuple[str, ...] | None) -> str:
    if not names:
        return ""
    shown = names if len(names) <= _CLASSES_SHOWN else (*names[: _CLASSES_SHOWN - 1], "…", names[-1])
    return f" of {len(names):,} class{'es' * (len(names) > 1)}: {', '.join(shown)}"


def _alone(function: Any) -> Any:
    """Returns a function of one example that calls one of batches."""

    # Not marked do_not_convert: AutoGraph must reach the user's function.
    def alone(*parts: Any) -> Any:
        batch = function(*tf.nest.map_structure(lambda part: part[tf.newaxis], parts))
        return tf.nest.map_structure(lambda part: part[0], batch)

    return alone


def _many_at_once(
    function: StageFunction, single: Any, options: PipelineOptions, facts: Facts, reason: str
) -> ManyAtOnce:
    largest = max(facts.sample.decoded_bytes, facts.sample.example_bytes, 1)
    size = max(1, min(options.batch_size, int(_CHUNK_BYTES / largest)))
    return ManyAtOnce(
        name=function.stage,
        setting=f"{size:,} at once",
        reason=reason,
        function=function,
        single=single,
        size=size,
    )


def _stage(function: StageFunction, setting: str, reason: str, group: MapGroup) -> FunctionStage:
    return FunctionStage(name=function.stage, setting=setting, reason=reason, function=function, group=group)
