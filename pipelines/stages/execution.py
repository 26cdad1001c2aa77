"""How tf.data runs the stages: whether it keeps their order, and how much memory and how many threads it takes."""

import math
from dataclasses import dataclass
from typing import Any

from tfopt.hardware import host
from tfopt.pipelines.cache.choice import MIB, CacheChoice
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.options import PipelineOptions
from tfopt.pipelines.stages.read import Mix
from tfopt.pipelines.stages.shuffle import SMALL_BYTES, Shuffle
from tfopt.pipelines.stages.stage import Flow, Stage

AHEAD_MIB = 1024  # for batches prepared ahead; tf.data would take half of the memory


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
