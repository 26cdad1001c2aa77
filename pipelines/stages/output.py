"""What happens to finished batches, and what all stages share: prefetch, the device, order, memory."""

import math
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from tfopt.hardware import host
from tfopt.pipelines.cache.choice import MIB, CacheChoice
from tfopt.pipelines.device.batch_functions import find_obstacles
from tfopt.pipelines.device.device_stage import DeviceStage, NotAttached, with_stage
from tfopt.pipelines.device.placing import OnDevice, choose_device, copy_ahead, is_gpu, place_beside, place_on_device
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.elements import leaves
from tfopt.pipelines.shared.options import PipelineOptions, Prefetch
from tfopt.pipelines.stages.read_shuffle import SMALL_BYTES, Mix, Shuffle
from tfopt.pipelines.stages.stage import Flow, ShapeCheck, Stage

AHEAD_MIB = 1024  # for batches prepared ahead; tf.data would take half of the memory
_CHUNK_BYTES = 64 * 2**20  # of examples on their way to the device


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchBatches(Stage):
    """Prepares batches ahead."""

    batches: Prefetch

    def apply(self, flow: Flow) -> None:
        """Prefetches, unless the option says 0."""
        if self.batches != 0:
            flow.dataset = flow.flush().prefetch(tf.data.AUTOTUNE if self.batches == "auto" else self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyToDevice(Stage):
    """Copies batches to a device before they are asked for."""

    device: str | None
    held: OnDevice | str | None  # where all examples are kept, for overlap; why they are not; None if not considered
    steps: int | None

    def apply(self, flow: Flow) -> None:
        """Has the flow end in a copy, unless batches are made on the device."""
        device = self.device
        if device is not None and self.held_only is None:
            flow.endings.append(lambda dataset, settings: copy_ahead(dataset, device, self.steps))

    @property
    def held_only(self) -> OnDevice | None:
        """Where cache="device" keeps the examples; None without it."""
        return self.held if isinstance(self.held, OnDevice) and self.held.only else None

    def summary(self) -> dict[str, Any]:
        """Returns the device."""
        return {"device": self.device, "on_device": isinstance(self.held, OnDevice)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap(Stage):
    """Attaches what makes batches on the device, for `tfopt.fit.overlap` to find."""

    held: OnDevice
    loading: tuple[Stage, ...]  # the stages that make examples, without a shuffle
    options: PipelineOptions
    facts: Facts
    steps: int | None

    def apply(self, flow: Flow) -> None:
        """Has the flow end in the device stage."""
        flow.endings.append(lambda dataset, settings: self._attached(dataset, settings, flow.description))

    def _attached(self, dataset: Any, settings: Any, description: str) -> Any:
        options, source, count = self.options, self.facts.source, self.facts.used or 0
        flow = Flow(description)
        for stage in self.loading:
            stage.apply(flow)
        rows = flow.dataset
        examples = flow.flush()
        # No larger than the count: `batch` allocates a whole one at once.
        size = min(count, math.ceil(_CHUNK_BYTES / max(self.facts.sample.example_bytes, 1)))
        if source.resident and source.decode is not None and options.transform is None and options.crop is None:
            chunks = rows.batch(size).map(source.decode)
        else:
            chunks = examples.batch(size)
        batches = DeviceStage(
            chunks=chunks.prefetch(1).with_options(settings),
            spec=examples.element_spec,
            element_spec=dataset.element_spec,
            count=count,
            options=options,
            held=self.held,
            settings=settings,
            steps=self.steps or 0,
        )
        return with_stage(NotAttached(dataset) if self.held.only else dataset, batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(Stage):
    """Says whether parallel stages keep the order of elements."""

    deterministic: bool

    def apply(self, flow: Flow) -> None:
        """Sets the option."""
        flow.settings.deterministic = self.deterministic

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


def plan_prefetch(options: PipelineOptions) -> Stage:
    """Returns the stage "prefetch"."""
    if options.prefetch == "auto":
        setting, reason = "auto", "tf.data sets how many batches it prepares ahead"
    else:
        setting, reason = f"{options.prefetch} batches", "asked for"
    return PrefetchBatches(name="prefetch", setting=setting, reason=reason, batches=options.prefetch)


def plan_device(options: PipelineOptions, facts: Facts, check: ShapeCheck | None) -> CopyToDevice:
    """Returns the stage "device", which also says whether all examples are kept there.

    Raises:
        ValueError: If there is no such device, or cache="device" does not go with the data or another option.
        UnsupportedError: If cache="device" is used under a distribution strategy.
        PipelineError: If the data do not fit.
    """
    held: OnDevice | str | None = None
    if options.on_device:
        held = place_on_device(options, facts)
        held = replace(held, obstacles=find_obstacles(options, _full_batch(options, facts, check)))
        device: str | None = held.device
        reason = "the examples are kept there, and batches are made there"
    else:
        device, reason = choose_device(options.device, facts.traced.augmented.element_spec)
        if device is not None and options.cache == "auto" and is_gpu(device):
            held = place_beside(options, facts, device)
    steps = facts.steps
    return CopyToDevice(name="device", setting=device or "none", reason=reason, device=device, held=held, steps=steps)


def plan_overlap(
    options: PipelineOptions, facts: Facts, device: CopyToDevice, loading: tuple[Stage, ...]
) -> list[Stage]:
    """Returns the stage "overlap", what `tfopt.fit.overlap` makes of the pipeline; none if it changes nothing."""
    held = device.held
    if held is None:
        return []
    if isinstance(held, str):
        reason = f"the examples are not kept on the device: {held}"
        return [Stage(name="overlap", setting="as above", reason=reason)]
    if held.only:
        setting = "needed"
        reason = "tfopt.fit.overlap(model) makes the batches; without it `fit` is refused"
    else:
        setting = "on the device"
        reason = f"with tfopt.fit.overlap the examples lie on {held.device}: {held.reason}; a plain `fit` goes as above"
    return [
        Overlap(
            name="overlap",
            setting=setting,
            reason=reason,
            held=held,
            loading=loading,
            options=options,
            facts=facts,
            steps=device.steps,
        )
    ]


def plan_order(options: PipelineOptions, cache: CacheChoice) -> Order:
    """Returns the stage "order"."""
    deterministic = options.service is None
    if options.service is not None:
        setting, reason = "free", "the service's workers deliver as they go, differently on each run"
    elif options.seed is not None:
        setting = f"seed {options.seed}"
        reason = "the same elements, order and augmentation on every run"
    elif not options.training or not options.shuffle:
        setting, reason = "kept", "training=False" if not options.training else "shuffle=False"
    elif cache.folder is not None:
        # Such a cache goes on with the source where it ends: both need one order.
        setting, reason = "kept", "shuffled without a seed; what is cached on disk keeps one order before that"
    else:
        deterministic = False
        setting, reason = "free", "shuffled without a seed: no element waits for a slower one"
    return Order(name="order", setting=setting, reason=reason, deterministic=deterministic)


def plan_memory(
    options: PipelineOptions, facts: Facts, cache: CacheChoice, shuffle: Shuffle, reading: list[Stage]
) -> Memory:
    """Returns the stage "memory"."""
    machine = host()
    allowed = math.ceil(machine.cpus)
    # In a container with a CPU quota TensorFlow would start a thread for each CPU that it sees.
    threads = allowed if allowed < len(machine.affinity) else None
    ahead_mib = max(AHEAD_MIB, math.ceil(8 * options.batch_size * facts.sample.example_bytes / MIB))
    mixing = sum(stage.buffer for stage in reading if isinstance(stage, Mix))
    mib = _bound_mib(facts, cache, shuffle, mixing, ahead_mib)
    bounded = "" if threads is None else f"; {threads} threads, as many as this container's CPUs"
    return Memory(
        name="memory",
        setting="unknown" if mib is None else f"≤ {mib:,.0f} MiB",
        reason=f"cache, shuffle, and up to {ahead_mib:,} MiB of batches ahead{bounded}",
        mib=mib,
        ahead_mib=ahead_mib,
        threads=threads,
    )


def _bound_mib(facts: Facts, cache: CacheChoice, shuffle: Shuffle, mixing: int, ahead_mib: int) -> float | None:
    sample = facts.sample
    in_memory = cache.on in ("memory", "device")  # what is kept on the device is gathered in host memory first
    if cache.on == "memory" and cache.bytes is None:
        return None
    cached = cache.bytes / MIB if in_memory and cache.bytes is not None else 0.0
    element = sample.raw_bytes if shuffle.first else max(sample.decoded_bytes, sample.example_bytes)
    shuffled = 0.0 if in_memory else shuffle.buffer * max(element, SMALL_BYTES) / MIB
    mixed = mixing * max(sample.raw_bytes, SMALL_BYTES) / MIB
    return cached + shuffled + mixed + ahead_mib


def _full_batch(options: PipelineOptions, facts: Facts, check: ShapeCheck | None) -> Any:
    """The element spec of a full batch of examples, with sampled shapes where TensorFlow knows none."""
    spec = facts.traced.examples.element_spec
    shapes = [leaf.shape for leaf in leaves(spec)] if check is None else check.shapes
    specs = [
        tf.TensorSpec((options.batch_size, *(shape or ())), leaf.dtype)
        for leaf, shape in zip(leaves(spec), shapes, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, specs)
