"""The stages of batches: batch, service, pad and prefetch; and what holds for all: order and memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines.cache.choice import CacheChoice
from tfopt.pipelines.cache.folder import TABLE_ROW
from tfopt.pipelines.device.placing import OnDevice
from tfopt.pipelines.inspection.facts import MIB, Facts
from tfopt.pipelines.service.client import describe_service, from_service
from tfopt.pipelines.shared.elements import element_of, is_static, pad_batch, without_autograph
from tfopt.pipelines.shared.nondeterminism import HELD, find_states
from tfopt.pipelines.shared.options import PipelineOptions, Prefetch
from tfopt.pipelines.shared.seeding import in_batches, of_length, shuffle
from tfopt.pipelines.sources.parts import Part, distributed
from tfopt.pipelines.stages.buckets import WINDOW, bucketed, choose_boundaries, lengths_of
from tfopt.pipelines.stages.example_stages import FunctionStage, plan_augment
from tfopt.pipelines.stages.order_stages import SMALL_BYTES, Mix, Shuffle
from tfopt.pipelines.stages.stage import Flow, Stage

AHEAD_MIB = 1024  # for batches prepared ahead; tf.data would take half of the memory

PADDING_NOTE = (
    "by repeating its own examples at weight 0, so that a loss that averages keeps its gradients; not preserved: "
    "reduction='sum', masked means, unweighted metrics, batch-norm statistics, epoch logs (docs/pipelines.md)"
)

_FIRST = without_autograph(lambda batch, _: batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Stage):
    """Batches the examples."""

    size: int
    steps: int | None  # batches per epoch
    length: int | None  # the same of this process alone; None if unknown
    full: bool  # whether all batches are full once they leave this stage, or the service
    served: bool  # whether the batches come from a service, whose workers each have a last one
    pinned: bool  # whether to make them by a map-and-batch, whose memory is pinned for the copy to a GPU
    padded: bool  # whether examples are padded to the longest of their batch
    boundaries: tuple[int, ...]  # the lengths they are padded to instead, together with similar ones; () for none

    def apply(self, flow: Flow) -> None:
        """Batches the dataset."""
        waits = flow.waits
        elements = flow.flush()
        if self.pinned and not waits:
            elements = elements.map(_checked(elements.element_spec), num_parallel_calls=tf.data.AUTOTUNE, name="batch")
        full = self.full and not self.served
        if self.boundaries:
            flow.dataset = self._bucketed(flow, bucketed(elements, self.size, self.boundaries, full=full))
        elif self.padded and not is_static(elements.element_spec):
            flow.dataset = elements.padded_batch(self.size, drop_remainder=full, name="batch")
        else:
            flow.dataset = in_batches(elements, self.size, full=full)
        if flow.is_moved:
            # Hides the size of a batch from strategies, too, which would divide a smaller last one unevenly.
            flow.dataset = of_length(flow.dataset, self.length, ends=flow.ends)
        flow.dataset._batch_size = tf.constant(self.size, tf.int64)  # for those who ask the stages

    def _bucketed(self, flow: Flow, batches: Any) -> Any:
        """Leaves out batches of a window that begins before the position, since examples change places within it."""
        if not flow.is_moved:
            return batches
        # Numbers below zero stand beside those that are left out.
        numbered = flow.beside(batches, lambda epoch: tf.data.Dataset.range(-(epoch.batch % flow.window), tf.int64.max))
        kept = numbered.filter(without_autograph(lambda _, number: number >= 0))
        return kept.map(_FIRST)

    def summary(self) -> dict[str, Any]:
        """Returns the number of steps, and the lengths that `bucket` chose."""
        lengths = {"bucket_lengths": list(self.boundaries)} if self.boundaries else {}
        return {"steps_per_epoch": self.steps, **lengths}


@dataclass(frozen=True, slots=True, kw_only=True)
class Service(Stage):
    """Has the workers of a tf.data service run the stages above."""

    options: PipelineOptions
    part: Part | None
    batch: Batch

    def apply(self, flow: Flow) -> None:
        """Replaces the batches by those the service delivers."""
        part, batch = self.part, self.batch
        flow.dataset = from_service(flow.flush(), self.options, part, full_batches=batch.full, steps=batch.steps)
        if part is not None:
            flow.endings.append(lambda dataset, settings: distributed(dataset, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers(Stage):
    """Gives the strategy this process' batches as they are, since it has read its part only."""

    part: Part

    def apply(self, flow: Flow) -> None:
        """Ends the part where that of another process ends, and hands it to the strategy last of all."""
        part = self.part
        numbered = flow.beside(flow.flush(), lambda epoch: tf.data.Dataset.range(epoch.batch, part.batches))
        flow.dataset = of_length(numbered.map(_FIRST), part.batches, ends=True)
        flow.endings.append(lambda dataset, settings: distributed(dataset, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad(Stage):
    """Fills the last batch, at weight zero."""

    size: int

    def apply(self, flow: Flow) -> None:
        """Maps `pad_batch` over the batches."""
        padded = without_autograph(lambda *batch: pad_batch(batch, self.size))
        flow.dataset = flow.flush().map(padded, num_parallel_calls=tf.data.AUTOTUNE, name="pad")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchBatches(Stage):
    """Prepares batches ahead."""

    batches: Prefetch

    def apply(self, flow: Flow) -> None:
        """Prefetches, unless the option says 0."""
        dataset = flow.flush()
        if flow.is_moved:
            # An iterator of a shuffle makes that of its input when it is first read. TensorFlow sets up all functions
            # for each, and Keras opens two an epoch and reads one.
            dataset = shuffle(dataset, 1, tf.constant([1, 1], tf.int64))
        if self.batches != 0:
            dataset = dataset.prefetch(tf.data.AUTOTUNE if self.batches == "auto" else self.batches)
        flow.dataset = dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Stage):
    """Says whether parallel stages keep the order of elements, and lets iterators be saved."""

    deterministic: bool

    def apply(self, flow: Flow) -> None:
        """Sets the options."""
        flow.settings.deterministic = self.deterministic
        flow.endings.insert(0, _with_savable_iterators)

    def summary(self) -> dict[str, Any]:
        """Returns whether the order is kept."""
        return {"deterministic": self.deterministic}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Stage):
    """Bounds what the pipeline takes."""

    mib: float | None  # cache, shuffle and batches ahead; None if unknown
    ahead_mib: int  # batches ahead alone
    threads: int | None  # None for TensorFlow's choice

    def apply(self, flow: Flow) -> None:
        """Sets the budgets."""
        flow.settings.autotune.ram_budget = self.ahead_mib * 2**20
        if self.threads is not None:
            flow.settings.threading.private_threadpool_size = self.threads
            flow.settings.autotune.cpu_budget = self.threads

    def summary(self) -> dict[str, Any]:
        """Returns the bound."""
        return {"memory_mib": self.mib}


def _with_savable_iterators(dataset: Any, settings: Any) -> Any:
    """Lets `tf.train.Checkpoint` save iterators over arrays, which TensorFlow takes for a state that would be lost."""
    if find_states(dataset) == {HELD}:
        policy = tf.data.Options()
        policy.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy.IGNORE
        options = dataset.options().merge(policy)
        # Only where an iterator looks: datasets made of this one, whose functions may keep a state, do not inherit it.
        dataset.options = lambda: options
    return dataset


def plan_batch(options: PipelineOptions, facts: Facts) -> Batch:
    """Returns the stage "batch"."""
    divides = facts.count is not None and facts.count % options.batch_size == 0
    # With several processes on a service, all of them trace their steps alike, whatever the size of their part.
    full = options.remainder == "drop" or (facts.part is None and divides)
    steps = facts.steps
    static = options.pad is None or is_static(facts.traced.augmented.element_spec)
    reason = f"every batch is full{', and its shape static' * static}" if full else _smaller_last(options, facts)
    out = left_out(options, facts)
    reason += f"; {out}" if out else ""
    reason += "" if steps is None else f"; {steps:,} steps an epoch"
    if facts.check is not None:
        reason += f"; shapes checked: {', '.join(map(str, facts.check.shapes))}"
    boundaries = _boundaries(options, facts)
    if options.pad is not None:
        reason += f"; {_padding(options, facts, boundaries)}"
    served = options.service is not None
    size = options.batch_size if served or facts.part is None else facts.part.size
    return Batch(
        name="batch",
        setting=f"{options.batch_size:,}",
        reason=reason,
        size=size,
        steps=steps,
        length=length_of(facts),
        full=full,
        served=served,
        pinned=facts.pinned and not served,
        padded=options.pad is not None,
        boundaries=boundaries,
    )


def length_of(facts: Facts) -> int | None:
    """Returns how many batches of an epoch this process makes; None if unknown."""
    if facts.infinite:
        return int(tf.data.INFINITE_CARDINALITY)
    return facts.steps if facts.part is None else facts.part.batches


def _boundaries(options: PipelineOptions, facts: Facts) -> tuple[int, ...]:
    if not options.bucket or is_static(facts.traced.augmented.element_spec):
        return ()
    return choose_boundaries(lengths_of(facts.sample.shapes, facts.traced.examples.element_spec))


def _padding(options: PipelineOptions, facts: Facts, boundaries: tuple[int, ...]) -> str:
    """Says what examples are padded to."""
    if is_static(facts.traced.augmented.element_spec):
        return "all examples have one shape, and need no padding"
    if not boundaries:
        return (
            "padded with zeros to the longest of each batch: XLA would compile for each length, and bucket=True makes "
            "few"
        )
    sampled = len(facts.sample.shapes)
    listed = ", ".join(map(str, boundaries))
    return (
        f"of each {WINDOW * options.batch_size:,} examples, similar lengths come together and are padded with zeros to "
        f"{listed}, chosen from {sampled:,} examples; XLA compiles for each of these lengths"
    )


def _smaller_last(options: PipelineOptions, facts: Facts) -> str:
    """Says why all examples are used, and what that costs."""
    used = f"all examples are used: {facts.last_batch[1]}"
    if options.remainder == "pad":
        return f"{used}; a smaller last batch is filled"
    if facts.count is None or facts.part is not None:
        return f"{used}; the last batch may be smaller, and XLA would compile a second time for it"
    last = facts.count % options.batch_size
    if facts.steps == 1:
        return f"{used}; the only batch has {last:,}"
    return f"{used}; the last batch has {last:,}, and XLA compiles a second time for it"


def left_out(options: PipelineOptions, facts: Facts) -> str:
    """Says how many examples are left out, and which; "" for none."""
    if facts.infinite or options.remainder != "drop":
        return ""
    if facts.count is None:
        return "examples that do not fill the last one are left out"
    read = options.batch_size * (facts.steps or 0) if facts.part is None else facts.part.used
    if read == facts.count:
        return ""
    which = "different ones in each epoch" if facts.mixed else "mostly the last ones in each epoch"
    which = which if options.shuffle else "the last, in each epoch"
    return f"{facts.count - read:,} of {facts.count:,} examples are left out, {which}"


def plan_batch_functions(options: PipelineOptions, held: OnDevice | str | None) -> list[Stage] | list[FunctionStage]:
    """Returns the stages "augment" of batches, after a stage "gather" if batches are made on the device."""
    augment = plan_augment(options, by_batch=True)
    if not isinstance(held, OnDevice) or not held.only:
        return augment
    reason = "by index, in a function of its own that XLA compiles"
    stages = [Stage(name="gather", setting="on the device", reason=reason)]
    for stage, obstacle in zip(augment, held.obstacles, strict=True):
        how = "compiled by XLA" if obstacle is None else f"without XLA: {obstacle}"
        seeds = "; a fresh seed for each batch" if stage.function.seeded else ""
        stages.append(replace(stage, reason=f"whole batches on the device, {how}{seeds}"))
    return stages


def plan_service(options: PipelineOptions, facts: Facts, batch: Batch) -> list[Stage]:
    """Returns the stage "service", if the pipeline uses one.

    Raises:
        PipelineError: If it does not answer.
    """
    if options.service is None:
        return []
    return [
        Service(
            name="service",
            setting=options.service,
            reason=describe_service(options, facts.part),
            options=options,
            part=facts.part,
            batch=batch,
        )
    ]


def plan_workers(options: PipelineOptions, facts: Facts) -> list[Stage]:
    """Returns the stage "workers" where several processes train together without a tf.data service."""
    part = facts.part
    if part is None or options.service is not None:
        return []
    setting = f"part {part.index + 1} of {part.parts}"
    reason = f"{facts.count or 0:,} of {part.whole:,} examples, {part.size:,} of each batch; TensorFlow divides nothing"
    return [Workers(name="workers", setting=setting, reason=reason, part=part)]


def plan_padding(options: PipelineOptions) -> list[Stage]:
    """Returns the stage "pad", if it was asked for."""
    if options.remainder != "pad":
        return []
    size = options.batch_size
    return [Pad(name="pad", setting=f"to {size:,}", reason=PADDING_NOTE, size=size)]


def plan_prefetch(options: PipelineOptions) -> Stage:
    """Returns the stage "prefetch"."""
    if options.prefetch == "auto":
        setting, reason = "auto", "tf.data sets how many batches it prepares ahead"
    else:
        setting, reason = f"{options.prefetch} batches", "asked for"
    return PrefetchBatches(name="prefetch", setting=setting, reason=reason, batches=options.prefetch)


def plan_order(options: PipelineOptions) -> Order:
    """Returns the stage "order"."""
    if options.service is not None:
        setting, reason = "free", "the service's workers deliver as they go, differently on each run"
    elif options.seed is not None:
        setting = f"seed {options.seed}"
        reason = "the same elements, order and augmentation on every run"
    elif options.training and options.shuffle:
        setting, reason = "drawn", "shuffled by a random seed, which tfopt.callbacks.TrainingCheckpoint saves"
    else:
        setting, reason = "kept", "training=False" if not options.training else "shuffle=False"
    return Order(name="order", setting=setting, reason=reason, deterministic=options.service is None)


def plan_memory(options: PipelineOptions, facts: Facts, held_mib: float | None) -> Memory:
    """Returns the stage "memory"; `held_mib` is what the stages up to the batch hold, None if unknown."""
    ahead_mib = max(AHEAD_MIB, math.ceil(8 * options.batch_size * facts.sample.example_bytes / MIB))
    mib = None if held_mib is None else held_mib + ahead_mib
    if mib is not None and options.bucket:
        mib += WINDOW * options.batch_size * facts.sample.example_bytes / MIB
    machine = host()
    allowed = math.ceil(machine.cpus)
    # In a container with a CPU quota TensorFlow would start a thread for each CPU that it sees.
    threads = allowed if allowed < len(machine.affinity) else None
    bounded = "" if threads is None else f"; {threads} threads, as many as this container's CPUs"
    return Memory(
        name="memory",
        setting="unknown" if mib is None else f"≤ {mib:,.0f} MiB",
        reason=f"cache, shuffle, and up to {ahead_mib:,} MiB of batches ahead{bounded}",
        mib=mib,
        ahead_mib=ahead_mib,
        threads=threads,
    )


def find_held_mib(
    facts: Facts, cache: CacheChoice, shuffle: Shuffle, reading: Sequence[Stage], *, on_gpu: bool
) -> float | None:
    """Returns what cache and shuffle hold in memory; None if unknown. `on_gpu` says where cache="device" is."""
    sample = facts.sample
    whole = cache.on in ("memory", "device")
    in_memory = whole and not (cache.on == "device" and on_gpu)
    if cache.on == "memory" and cache.bytes is None:
        return None
    cached = cache.bytes / MIB if in_memory and cache.bytes is not None else 0.0
    cached += TABLE_ROW * (facts.count or 0) / MIB if cache.folder is not None else 0.0
    element = sample.raw_bytes if shuffle.first else max(sample.decoded_bytes, sample.example_bytes)
    element = 0.0 if shuffle.drawn else element  # positions
    shuffled = 0.0 if whole else shuffle.buffer * max(element, SMALL_BYTES) / MIB
    mixing = sum(stage.buffer for stage in reading if isinstance(stage, Mix))
    return cached + shuffled + mixing * max(sample.raw_bytes, SMALL_BYTES) / MIB


def _checked(spec: Any) -> Any:
    """Returns a function that gives an element as it is, which TensorFlow does not remove."""

    @without_autograph
    def checked(*element: Any) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.ensure_shape(leaf, leaf.shape), element_of(element, spec))

    return checked
