"""The stages that decide the order of elements: read, mix and shuffle."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.pipelines.cache.choice import CacheChoice, keeps_one_order, reads_by_position, reads_in_pools
from tfopt.pipelines.inspection.facts import MIB, SHUFFLE_MIB, SHUFFLE_MOST, Facts
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.epochs import Draw, Epoch, in_one_order, in_one_permutation, reshuffled
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.shared.seeding import (
    either,
    from_batches,
    part_seed,
    permutation,
    permuted,
    random_bits,
    sequence,
    shuffle,
    shuffle_anew,
)
from tfopt.pipelines.sources.source import Source
from tfopt.pipelines.stages.balance import Balance, plan_balance
from tfopt.pipelines.stages.example_stages import Cache
from tfopt.pipelines.stages.stage import Flow, Stage
from tfopt.text import readable_bytes

_CLASSES_SHOWN = 8
_MOST_UNKNOWN = 10_000  # elements if the count is unknown: the first batch waits for all of them
SMALL_BYTES = 64  # below this, the buffer's own entry takes the memory rather than the element


@dataclass(frozen=True, slots=True, kw_only=True)
class Read(Stage):
    """Reads raw elements."""

    source: Source
    count: int | None
    used: int | None  # how many to read
    shuffled: bool  # whether the source reads its parts in random order
    lasting: bool  # whether that is one for all epochs
    # The permutation it reads in, by position or in pools: another in "each" epoch, "one" for all, or one that is
    # shuffled from the second epoch on, as it would be "behind" a cache. "" for the source's own order.
    permuted: str
    ordered: bool  # whether nothing after it changes the order
    seed: int | None  # of an order that all epochs share; None for the pipeline's
    local: bool  # whether it runs in this process, not on the workers of a tf.data service
    balance: Balance | None = None  # the order of each epoch, in place of a permutation

    def apply(self, flow: Flow) -> None:
        """Starts the flow with the source's dataset."""
        source = self.source
        if source.at is not None and self.permuted == "one":
            flow.dataset = source.at(in_one_permutation(self.count or 0, flow.place, flow.number, self.seed))
        elif source.at is not None and self.permuted:
            flow.dataset = source.at(self._order(flow))
        elif source.pools is not None and self.permuted:
            flow.dataset = from_batches(source.pools.read(flow.begin(_drawn)), None)
        elif not self.ordered or flow.is_served:
            flow.dataset = self._in_order(flow)
        elif source.at is not None and source.resident and self.used is not None:
            flow.dataset = source.at(self._numbers(flow))
        else:
            whole = self._in_order(flow)
            flow.dataset = flow.begin(partial(self._from_position, whole))

    def _order(self, flow: Flow) -> Any:
        """Returns which elements are read in each epoch, in random order."""
        count = self.count or 0
        if self.balance is not None:
            if flow.epoch is None:
                return flow.begin_numbers(self.balance.order, count)
            with tf.device("CPU:0"):
                start = replace(flow.place.position, epoch=0)
                return tf.data.Dataset.from_tensor_slices(self.balance.order(start))
        if self.permuted == "behind":
            return flow.begin(self._behind)
        if flow.epoch is None:
            return flow.begin_numbers(lambda start: permuted(count, Draw("files").key(start)), count)
        return flow.begin(partial(_permutation, count))

    def _behind(self, epoch: Epoch) -> Any:
        order = permutation(self.count or 0, epoch.lasting_key("mix"))
        again = partial(reshuffled, order, self.count or 0, epoch, rests=True)
        return epoch.readings.each(again)

    def _numbers(self, flow: Flow) -> Any:
        """Returns which elements are read in each epoch, in the source's own order."""
        count = self.used or 0
        if flow.epoch is None:
            return flow.begin_numbers(lambda _: np.arange(count), count)
        return flow.begin(partial(_sequence, count))

    def _in_order(self, flow: Flow) -> Any:
        """Returns the elements in the source's own order, or that in which it reads its parts."""
        source, shuffled = self.source, self.source.shuffled if self.shuffled else None
        if shuffled is not None and source.keyed and not flow.is_served:

            def by_key(epoch: Epoch) -> Any:
                return shuffled(epoch.lasting_key("files") if self.lasting else epoch.key("files"))

            if self.lasting and flow.epoch is None:
                return self._whole(in_one_order(flow.place, flow.number, self.seed, by_key))
            return self._whole(flow.go_on(by_key))
        with tf.init_scope():  # a dataset of its own, not one that each epoch makes again
            made = source.dataset() if shuffled is None else shuffled(part_seed(self.seed, "files"))
            dataset = self._whole(made)
            flow.outside.append(dataset)
        return dataset

    def _whole(self, dataset: Any) -> Any:
        if self.local and self.count is not None and (not tf.executing_eagerly() or int(dataset.cardinality()) < 0):
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(self.count))
        return dataset if self.used == self.count else dataset.take(self.used)

    def _from_position(self, whole: Any, epoch: Epoch) -> Any:
        """Returns the elements in the source's own order, from a position on."""
        begun, source = epoch.readings.again(whole), self.source
        if source.at is None or self.used is None:
            return begun
        is_moved = tf.greater(tf.cast(epoch.readings.skipped, tf.int64), 0)
        return either(is_moved, source.at(_sequence(self.used, epoch)), begun)

    def in_own_order(self) -> "Read":
        """Returns the stage without any order but the source's."""
        return replace(self, shuffled=False, permuted="", ordered=False)

    @property
    def skips(self) -> bool:
        """Whether it begins in the middle of an epoch without reading what comes before."""
        return self.source.at is not None or bool(self.permuted)

    def summary(self) -> dict[str, object]:
        """Returns the source's name and count."""
        return {"source": self.source.name, "count": self.count}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix(Stage):
    """Shuffles raw elements once, into the one order of a cache."""

    buffer: int
    seed: int | None  # of its own, or the pipeline's

    def apply(self, flow: Flow) -> None:
        """Shuffles the elements in the same way on every iteration."""
        elements, length = flow.dataset, _length(flow.dataset)
        mixed = in_one_order(
            flow.place, flow.number, self.seed, lambda epoch: shuffle(elements, self.buffer, epoch.lasting_key("mix"))
        )
        flow.dataset = mixed if length is None else mixed.apply(tf.data.experimental.assert_cardinality(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle(Stage):
    """Shuffles raw elements or examples."""

    buffer: int  # how many elements it draws from; 0 for no shuffle
    first: bool  # whether it comes before decoding, on raw elements
    drawn: bool  # whether the order is drawn elsewhere, on the device or where the source is read
    rests: bool  # whether the first epoch keeps the order of the elements, which are shuffled as they come

    def apply(self, flow: Flow) -> None:
        """Shuffles, differently on every iteration; examples of a cache on disk by their positions."""
        elements, cached = flow.flush(), flow.cached
        shuffles = self.buffer and not self.drawn
        if cached is not None:
            flow.cached = None
            if cached.at is None:
                flow.dataset = cached.in_order(flow.begin, self._shuffled if shuffles else _again)
            else:
                drawn = _permutation if self.buffer else _sequence
                flow.dataset = cached.by_position(flow.begin, partial(drawn, cached.store.count))
            return
        if flow.is_served:
            flow.dataset = shuffle_anew(elements, self.buffer) if shuffles else elements
        elif shuffles:
            flow.dataset = flow.begin(partial(self._shuffled, elements))
        elif not flow.has_begun:
            flow.dataset = flow.begin(partial(_again, elements))

    def _shuffled(self, elements: Any, epoch: Epoch) -> Any:
        # One more than there may be, so that the end is asked for: a cache in memory is whole only then.
        buffer = self.buffer + 1
        return epoch.readings.each(lambda reading: reshuffled(elements, buffer, epoch, reading, rests=self.rests))

    def summary(self) -> dict[str, object]:
        """Returns the buffer's size."""
        return {"shuffle_buffer": self.buffer}


def _again(elements: Any, epoch: Epoch) -> Any:
    """Returns elements in their own order for each reading of an epoch."""
    return epoch.readings.again(elements)


def _permutation(count: int, epoch: Epoch) -> Any:
    """Returns the numbers below `count` in another random order for each reading of each epoch."""
    readings = epoch.readings
    if readings.times == 1:
        return permutation(count, epoch.key("files"), skipped=readings.skipped)
    return readings.each(lambda reading: permutation(count, epoch.key("files", reading)))


def _sequence(count: int, epoch: Epoch) -> Any:
    """Returns the numbers below `count` in their own order for each reading of an epoch."""
    readings = epoch.readings
    return sequence(count, skipped=readings.skipped) if readings.times == 1 else readings.again(sequence(count))


def _drawn(epoch: Epoch) -> Any:
    """Returns a dataset of the random bits of each reading, and of how many elements are left out of it."""
    readings = epoch.readings

    @without_autograph
    def reading(number: Any) -> Any:
        skipped = tf.where(tf.equal(number, readings.whole), tf.cast(readings.rest, tf.int64), 0)
        return random_bits(epoch.key("files", number)), skipped

    return tf.data.Dataset.range(readings.whole, readings.times).map(reading)


def _length(dataset: Any) -> int | None:
    """Returns the length of a dataset; None if unknown, or in a graph."""
    length = int(dataset.cardinality()) if tf.executing_eagerly() else tf.data.UNKNOWN_CARDINALITY
    return None if length == tf.data.UNKNOWN_CARDINALITY else length


def plan_reading(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> tuple[Read, *tuple[Mix | Balance, ...]]:
    """Returns the stage "read", and "balance", or "mix" before a cache that is shuffled."""
    source, count = facts.source, facts.count
    # What is cached on disk has one order, for later runs too.
    seed = options.seed or 0 if cache.folder is not None else options.seed
    permuted = ""
    by_position = reads_by_position(options, facts)
    if by_position and cache.on != "device" and cache.folder is None:
        uncached = "behind" if keeps_one_order(options, facts, cache) else "each"
        permuted = uncached if cache.on is None else "one"
    elif reads_in_pools(options, facts, cache):
        permuted = "each"
    shuffled = bool(options.shuffle) and source.shuffled is not None and not permuted and not by_position
    read = Read(
        name="read",
        setting=source.name,
        reason=_reason(options, facts, shuffled=shuffled),
        source=source,
        count=count,
        used=facts.used,
        shuffled=shuffled,
        lasting=keeps_one_order(options, facts, cache),
        permuted=permuted,
        ordered=cache.on is None and (bool(permuted) or not options.shuffle),
        seed=seed,
        local=options.service is None,
    )
    if permuted == "one":
        return (replace(read, reason=f"{read.reason}; in one random order, that of the cache, by their positions"),)
    if not _mixes(options, facts, cache):
        balance = plan_balance(options, facts)
        return (replace(read, balance=next(iter(balance), None)), *balance)
    buffer = max(1, fitting_buffer(count, facts.sample.raw_bytes, at_hand=source.is_at_hand)[0])
    reason = "shuffled once: the order of the first epoch, and of a cache"
    return read, Mix(name="mix", setting=f"buffer of {buffer:,}", reason=reason, buffer=buffer, seed=seed)


def plan_shuffle(options: PipelineOptions, facts: Facts, cache: Cache) -> Shuffle:
    """Returns the stage "shuffle"; without a shuffle, it says so."""
    choice = cache.choice
    rests = _rests(options, facts, choice) and not cache.repeats_first_epoch
    buffer, reason, first = _decide_shuffle(options, facts, choice)
    reason += "; the first epoch comes in the order of the mix" if rests else ""
    in_pools = reads_in_pools(options, facts, choice)
    drawn = in_pools or choice.on == "device" or (choice.on != "memory" and reads_by_position(options, facts))
    held = "pools of about" if in_pools else "all" if drawn else "buffer of"
    return Shuffle(
        name="shuffle",
        setting=f"{held} {buffer:,}" if buffer else "none",
        reason=reason,
        buffer=buffer,
        first=first,
        drawn=drawn,
        rests=rests,
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


def _decide_shuffle(options: PipelineOptions, facts: Facts, cache: CacheChoice) -> tuple[int, str, bool]:
    """Returns the buffer, the reason, and whether to shuffle raw elements."""
    sample = facts.sample
    if not options.shuffle:
        return 0, "shuffle=False" if options.training else "training=False keeps the order", False
    if cache.on == "device":
        return facts.count or 0, "indices: each epoch is one permutation of all examples, drawn at once", False
    if facts.source.pools is not None and reads_in_pools(options, facts, cache):
        reason = "read in random order, and each shuffled as a whole: rows far apart may never be in one"
        return min(facts.source.pools.size, facts.count or 0), reason, True
    permuted = reads_by_position(options, facts)
    if options.balance is not None:
        return facts.count or 0, "within each class, by position", True
    if permuted and cache.on != "memory":
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
