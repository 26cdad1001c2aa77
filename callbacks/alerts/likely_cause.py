"""Why a GPU is not used well, as far as the readings tell."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tfopt.callbacks.thresholds import (
    BUSY_PERCENT,
    SHORT_KERNELS,
    SM_ACTIVE_PERCENT,
    TENSOR_ACTIVE_PERCENT,
    WAITING_PERCENT,
)
from tfopt.callbacks.throttling import SLOWED_BY
from tfopt.hardware import GpuSample

# With fewer multiprocessors at work there is too little to do, in whatever type.
_WORKING_PERCENT = 20.0
# More than the CUDA context of a process that computes nothing takes, which is some hundreds of MiB.
_OTHERS_MIB = 1024.0
_FULL = 0.95

_SLOW_BELOW = {
    "gpu_utilization_percent",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_active_percent",
    "dram_active_percent",
    "gpu_power_watts",
    "examples_per_second",
    "model_tflops_per_second",
    "mfu_percent",
}
_SLOW_ABOVE = {"step_time_ms", "step_time_p95_ms", "step_time_p99_ms", "input_wait_percent"}
_MEMORY_ABOVE = {"gpu_memory_used_mib", "gpu_memory_process_mib", "gpu_memory_others_mib"}
_HOT_ABOVE, _HOT_BELOW = {"gpu_temperature_celsius"}, {"sm_clock_mhz", "memory_clock_mhz"}

_REMEDIES = {
    "power": "Its power limit sets the pace: nvidia-smi -q -d POWER shows it, and nvidia-smi -pl raises it.",
    "heat": "See to its cooling: nvidia-smi -q -d TEMPERATURE shows the limits.",
    "heat or power": "See to its cooling and its power supply: nvidia-smi -q -d PERFORMANCE shows which it is.",
}

_PHASES = {
    "training": (
        ". It waits for its batch (tfopt.pipelines.profile_pipeline(dataset) names the slow stage), is being compiled "
        "anew (tfopt.callbacks.CompilationLogger tells), or simply takes so long."
    ),
    "validation": (
        ": the validation runs. Take fewer batches of it (validation_steps), or validate less often (validation_freq)."
    ),
    "between epochs": (
        ": fit is between two epochs. Look at what callbacks do there, such as writing checkpoints: do it less often."
    ),
}


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known at the moment when a metric has been beyond its bound for too long.

    Attributes:
        metric: Which metric, as `GpuSample` or `ThroughputLogger` names it.
        above: Whether it is above its bound; otherwise below.
        gpus: The readings of the GPUs in question: their means over the time beyond the bound, and the throttle reason
            that was seen most.
        throughput: What `ThroughputLogger` told over that time, as means; empty where it told nothing.
        float32: Whether the model computes in float32 alone.
        memory_grows: Whether TensorFlow takes GPU memory as it needs it. Otherwise it takes nearly all at the start,
            and a full memory says nothing.
        stalled_seconds: How long no training step has ended, where that is long; otherwise None.
        phase: What `fit` is doing: "training", "validation" or "between epochs".
    """

    metric: str
    above: bool
    gpus: Sequence[GpuSample] = ()
    throughput: Mapping[str, Any] | None = None
    float32: bool = False
    memory_grows: bool = False
    stalled_seconds: float | None = None
    phase: str = "training"

    @property
    def wait_percent(self) -> float | None:
        """How long the training waits for its input."""
        return (self.throughput or {}).get("input_wait_percent")


def likely_cause(situation: Situation) -> str:
    """Returns the likely cause in words, with the remedy; or says that none is known to fit.

    The first that fits, in this order: no step ends, as in a long validation; the training waits for input (20 % of
    its time or more); the GPU is throttled by power or heat; another process holds a GiB or more of its memory; the
    model computes in float32 while the multiprocessors work and the tensor cores do not (below 1 %); many short kernels
    (a GPU that is in use less than 80 % of the time without a wait for input, or while less than half of its
    multiprocessors are); its memory is full (95 %). Memory that runs full is looked into for what takes it, a clock
    that falls for what holds it.

    Example:
        >>> row = {"input_wait_percent": 63.0}
        >>> print(likely_cause(Situation("gpu_utilization_percent", above=False, throughput=row))[:60])
        Likely cause: the training waits for input 63 % of its time.
    """
    rules = _rules(situation)
    for rule in rules:
        for gpu in situation.gpus or (GpuSample(0.0, 0.0),):
            found = rule(situation, gpu)
            if found:
                return f"Likely cause: {found}"
    unknown = list(_unknown(situation)) if rules else []
    missing = f" Not known here: {', '.join(unknown)}." if unknown else ""
    return f"None of the causes that tfopt can tell fits.{missing} tfopt.callbacks.StepProfiler shows what a step does."


Rule = Callable[[Situation, GpuSample], str | None]


def _rules(situation: Situation) -> tuple[Rule, ...]:
    """The causes that a metric beyond this bound may have."""
    metric, above = situation.metric, situation.above
    if metric in (_SLOW_ABOVE if above else _SLOW_BELOW):
        of_a_step = _waiting_for_input, _throttled, _other_process, _idle_tensor_cores, _short_kernels, _memory_full
        return _no_steps, *of_a_step
    if above and metric in _MEMORY_ABOVE:
        return _other_process, _memory_full
    return (_throttled,) if metric in (_HOT_ABOVE if above else _HOT_BELOW) else ()


def _no_steps(situation: Situation, gpu: GpuSample) -> str | None:
    if situation.stalled_seconds is None:
        return None
    return f"no training step has ended for {situation.stalled_seconds:.0f} s{_PHASES[situation.phase]}"


def _waiting_for_input(situation: Situation, gpu: GpuSample) -> str | None:
    percent = situation.wait_percent
    if percent is None or percent < WAITING_PERCENT:
        return None
    return (
        f"the training waits for input {percent:.0f} % of its time. tfopt.pipelines.profile_pipeline(dataset) names "
        "the slow stage; build_pipeline decodes in parallel, caches and prefetches."
    )


def _throttled(situation: Situation, gpu: GpuSample) -> str | None:
    for reason in gpu.throttle_reasons or ():
        if reason in SLOWED_BY:
            power, heat = gpu.gpu_power_watts, gpu.gpu_temperature_celsius
            at = f"{'' if power is None else f', {power:.0f} W'}{'' if heat is None else f', {heat:.0f} °C'}"
            by = SLOWED_BY[reason]
            return f"GPU:{gpu.index} is throttled by {by} ({reason}{at}). {_REMEDIES[by]}"
    return None


def _other_process(situation: Situation, gpu: GpuSample) -> str | None:
    others, total = gpu.gpu_memory_others_mib, gpu.gpu_memory_total_mib
    if others is None or others < _OTHERS_MIB:
        return None
    share = f"{others:,.0f} of {total:,.0f} MiB ({100 * others / total:.0f} %)" if total else f"{others:,.0f} MiB"
    return (
        f"another process is on GPU:{gpu.index}. It holds {share} of the memory, and may compute there too. "
        "nvidia-smi names it; choose a free GPU with CUDA_VISIBLE_DEVICES."
    )


def _idle_tensor_cores(situation: Situation, gpu: GpuSample) -> str | None:
    tensor, active = gpu.tensor_active_percent, gpu.sm_active_percent
    if not situation.float32 or tensor is None or active is None:
        return None
    if tensor >= TENSOR_ACTIVE_PERCENT or active < _WORKING_PERCENT:
        return None
    return (
        f"the model computes in float32, and the tensor cores of GPU:{gpu.index} are idle ({tensor:.1f} %, while "
        f'{active:.0f} % of its multiprocessors work). tfopt.precision.set_policy("auto") chooses a 16-bit policy '
        "before the model is made; tfopt.precision.check(model, dataset) tells whether it trains as well."
    )


def _short_kernels(situation: Situation, gpu: GpuSample) -> str | None:
    used, active = gpu.gpu_utilization_percent, gpu.sm_active_percent
    if used is None:
        return None
    if used < BUSY_PERCENT and situation.wait_percent is not None:
        found = f"GPU:{gpu.index} is idle {100 - used:.0f} % of the time, though not for lack of input"
    elif used >= SM_ACTIVE_PERCENT and active is not None and active < SM_ACTIVE_PERCENT:
        found = f"GPU:{gpu.index} is in use {used:.0f} % of the time, but {active:.0f} % of its multiprocessors work"
    else:
        return None
    return f"{found}: {SHORT_KERNELS}"


def _memory_full(situation: Situation, gpu: GpuSample) -> str | None:
    used, total = gpu.gpu_memory_used_mib, gpu.gpu_memory_total_mib
    asked = situation.metric in _MEMORY_ABOVE
    if used is None or not total or used <= _FULL * total or not (situation.memory_grows or asked):
        return None
    taken = (
        ""
        if situation.memory_grows
        else (
            " TensorFlow takes nearly all of it at the start, needed or not: tf.config.experimental.set_memory_growth."
        )
    )
    return (
        f"the memory of GPU:{gpu.index} is nearly full ({used:,.0f} of {total:,.0f} MiB). Take a smaller batch or a "
        f'16-bit policy (tfopt.precision.set_policy("auto")).{taken}'
    )


def _unknown(situation: Situation) -> Iterator[str]:
    """What would have told more."""
    if situation.wait_percent is None:
        yield "input_wait_percent"
    for name in ("gpu_utilization_percent", "sm_active_percent", "throttle_reasons", "gpu_memory_others_mib"):
        if all(getattr(gpu, name) is None for gpu in situation.gpus):
            yield name
