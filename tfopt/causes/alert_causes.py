"""Picks the likely cause of an alert, from readings."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tfopt.causes.between_gpus import OTHERS_MIB, Replicas, straggler, unused_gpus, waits_in_all_reduce
from tfopt.causes.catalogue import (
    BETWEEN_EPOCHS,
    BUSY_PERCENT,
    FLOAT32,
    FULL_MEMORY,
    FULL_SHARE,
    INPUT,
    NEW_SHAPES,
    OTHER_PROCESS,
    SHORT_KERNELS,
    SM_ACTIVE_PERCENT,
    TENSOR_ACTIVE_PERCENT,
    THROTTLED,
    VALIDATION,
    WAITING_PERCENT,
    Cause,
)
from tfopt.causes.readings import SLOWED_BY, Readings
from tfopt.hardware import GpuSample

# With fewer active multiprocessors there is too little work in any dtype.
_WORKING_PERCENT = 20.0
# By what fit is doing.
NO_STEPS = {
    "training": Cause(
        "",  # what it does cannot be told
        "The step waits for its batch (tfopt.pipelines.profile_pipeline(dataset) names the slow stage), is being "
        "recompiled (tfopt.callbacks.CompilationLogger tells), or is simply slow; tfopt cannot tell which.",
    ),
    "first step": Cause(
        "the first step is running",
        "It traces and compiles, which takes minutes for a large model. If it goes on, check that a first batch comes "
        "(tfopt.pipelines.profile_pipeline(dataset)) and that all workers have started.",
    ),
    "input": Cause(
        "fit waits for a batch",
        "tfopt.pipelines.profile_pipeline(dataset) names the slow stage. If none ever comes, look at what that stage "
        "reads from: a disk, a network share, a generator, a tf.data service.",
    ),
    "step": Cause(
        "the step has its batch and is running",
        "It is being recompiled (tfopt.callbacks.CompilationLogger tells), waits for another device, or is simply "
        "slow.",
    ),
    "all-reduce": Cause(
        "the GPUs run without pause, so they wait in an all-reduce for a replica that has stopped",
        "Find the GPU that idles, or the worker that has stopped: its log has the reason. The launcher of "
        "tfopt.distribute names a lost worker and ends the others.",
    ),
    "tracing": Cause(
        "TensorFlow is tracing a function",
        f"If that happens again and again, shapes or Python arguments change. {NEW_SHAPES.remedy}",
    ),
    "callback": Cause("fit is in a callback", "Check what it waits for, such as a disk or a network."),
    "validation": Cause("validation is running", VALIDATION.remedy),
    "between epochs": Cause("fit is between two epochs", BETWEEN_EPOCHS.remedy),
}

# Metrics that slow training pushes below or above a bound.
_SLOW_BELOW = {
    "gpu_utilization_percent",
    "sm_active_percent",
    "sm_occupancy_percent",
    "tensor_active_percent",
    "dram_active_percent",
    "gpu_power_watts",
    "examples_per_second",
    "tokens_per_second",
    "model_tflops_per_second",
    "mfu_percent",
}
_SLOW_ABOVE = {"step_time_ms", "step_time_p95_ms", "step_time_p99_ms", "input_wait_percent", "seconds_since_step"}
_MEMORY_ABOVE = {"gpu_memory_used_mib", "gpu_memory_process_mib", "gpu_memory_others_mib"}
_HOT_ABOVE, _HOT_BELOW = {"gpu_temperature_celsius"}, {"sm_clock_mhz", "memory_clock_mhz"}


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known about a metric that has been beyond its bound for too long."""

    metric: str
    above: bool
    readings: Readings = field(default_factory=Readings)
    """Means over the time beyond the bound."""
    gpu_index: int | None = None
    """The GPU whose metric it is; None: the training's or the host's."""
    replicas: Replicas | None = None
    """How the model is spread over devices, None if unknown."""
    float32: bool = False
    """Whether the model computes only in float32."""
    memory_grows: bool = False
    """Whether TensorFlow takes GPU memory as needed. Otherwise it takes nearly all of it at the start, and full memory
    means nothing."""
    stalled_seconds: float | None = None
    """Time since the last training step ended, if unusually long."""
    phase: str = "training"
    """What `fit` is doing: a key of `NO_STEPS`."""
    callback: str | None = None
    """The callback's method that `fit` is in, if it is in one."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a metric is beyond its bound."""

    text: str
    """The likely cause and its remedy, or that no known cause fits."""
    gpus: tuple[int, ...] = ()
    """The GPUs of which it is one and the same cause, if it comes from comparing GPUs with each other."""


def likely_cause(situation: Situation) -> Explanation:
    """Returns the likely cause and its remedy, or says that no known cause fits.

    The first that fits, in this order: no step ends; a GPU that no replica uses, or one that the others wait for;
    waiting for input; throttling; another process on the GPU; idle tensor cores in float32; many short kernels; full
    memory. A metric of memory is explained only by what takes memory, a clock or temperature only by throttling.

    Example:
        >>> readings = Readings(input_wait_percent=63.0)
        >>> print(likely_cause(Situation("gpu_utilization_percent", False, readings)).text[:60])
        Likely cause: the training waits for input 63 % of its time.
    """
    rules = _rules(situation)
    slow = rules[:1] == (_no_steps,)
    if slow and (compared := _compared(situation)):
        return compared
    gpus = _in_question(situation)
    for rule in rules:
        for gpu in gpus or (GpuSample(0.0, 0.0),):
            found = rule(situation, gpu)
            if found:
                return Explanation(f"Likely cause: {found}")
    unknown = list(_unknown(situation.readings, gpus)) if rules else []
    missing = f" Unknown here: {', '.join(unknown)}." if unknown else ""
    return Explanation(f"No cause known to tfopt fits.{missing} tfopt.callbacks.StepProfiler shows what a step does.")


def _compared(situation: Situation) -> Explanation | None:
    """What comparing the GPUs with each other explains."""
    readings, index = situation.readings, situation.gpu_index
    unused = unused_gpus(readings.gpus, situation.replicas)
    if unused is not None and index in unused.idle:
        return Explanation(f"{'Likely cause: ' if unused.mistake else ''}{unused.text}", unused.idle)
    if situation.stalled_seconds is not None:
        return None
    # While the input is the limit, more GPUs would only wait for it.
    if unused is not None and unused.mistake and index is None and not input_limits(readings):
        return Explanation(f"Likely cause: {unused.text}")
    slow = straggler(readings.gpus, situation.replicas)
    if slow is None or index == slow.index:
        return None
    others = tuple(gpu.index for gpu in readings.gpus if gpu.index is not None and gpu.index != slow.index)
    return Explanation(f"Likely cause: {slow.text}", others if index is not None else ())


def _in_question(situation: Situation) -> list[GpuSample]:
    """The GPUs that one of the other causes may concern."""
    gpus, index = situation.readings.gpus, situation.gpu_index
    if index is not None:
        return [gpu for gpu in gpus if gpu.index == index]
    unused = unused_gpus(gpus, situation.replicas)
    return [gpu for gpu in gpus if unused is None or gpu.index not in unused.idle]


def input_limits(readings: Readings) -> bool:
    """Whether the training waits for input so much that nothing else counts."""
    return readings.input_wait_percent is not None and readings.input_wait_percent >= WAITING_PERCENT


Rule = Callable[[Situation, GpuSample], str | None]


def _rules(situation: Situation) -> tuple[Rule, ...]:
    metric, above = situation.metric, situation.above
    if metric in (_SLOW_ABOVE if above else _SLOW_BELOW):
        in_a_step = _waiting_for_input, _throttled, _other_process, _idle_tensor_cores, _short_kernels, _full_memory
        return _no_steps, *in_a_step
    if above and metric in _MEMORY_ABOVE:
        return _other_process, _full_memory
    return (_throttled,) if metric in (_HOT_ABOVE if above else _HOT_BELOW) else ()


def _no_steps(situation: Situation, gpu: GpuSample) -> str | None:
    if situation.stalled_seconds is None:
        return None
    cause = NO_STEPS[situation.phase]
    in_a_step = situation.phase in ("training", "step")
    if in_a_step and waits_in_all_reduce(situation.readings.gpus, situation.replicas):
        cause = NO_STEPS["all-reduce"]
    doing = f": {cause.name}" if cause.name else ""
    if situation.callback:
        doing += f" ({situation.callback})"
    return f"no training step has ended for {situation.stalled_seconds:.0f} s{doing}. {cause.remedy}"


def _waiting_for_input(situation: Situation, gpu: GpuSample) -> str | None:
    if not input_limits(situation.readings):
        return None
    return f"the training waits for input {situation.readings.input_wait_percent:.0f} % of its time. {INPUT.remedy}"


def _throttled(situation: Situation, gpu: GpuSample) -> str | None:
    for reason in gpu.throttle_reasons or ():
        if reason in SLOWED_BY:
            power, heat = gpu.gpu_power_watts, gpu.gpu_temperature_celsius
            at = f"{'' if power is None else f', {power:.0f} W'}{'' if heat is None else f', {heat:.0f} °C'}"
            cause = THROTTLED[SLOWED_BY[reason]]
            return f"GPU:{gpu.index} is throttled by {cause.name} ({reason}{at}). {cause.remedy}"
    return None


def _other_process(situation: Situation, gpu: GpuSample) -> str | None:
    others, total = gpu.gpu_memory_others_mib, gpu.gpu_memory_total_mib
    if others is None or others < OTHERS_MIB:
        return None
    share = f"{others:,.0f} of {total:,.0f} MiB ({100 * others / total:.0f} %)" if total else f"{others:,.0f} MiB"
    return (
        f"another process is on GPU:{gpu.index}. It holds {share} of the memory, and may compute there too. "
        f"{OTHER_PROCESS.remedy}"
    )


def _idle_tensor_cores(situation: Situation, gpu: GpuSample) -> str | None:
    tensor, active = gpu.tensor_active_percent, gpu.sm_active_percent
    if not situation.float32 or tensor is None or active is None:
        return None
    if tensor >= TENSOR_ACTIVE_PERCENT or active < _WORKING_PERCENT:
        return None
    return (
        f"the model computes in float32, and the tensor cores of GPU:{gpu.index} are idle ({tensor:.1f} %, while "
        f"{active:.0f} % of its multiprocessors work). {FLOAT32.remedy}"
    )


def _short_kernels(situation: Situation, gpu: GpuSample) -> str | None:
    used, active = gpu.gpu_utilization_percent, gpu.sm_active_percent
    if used is None:
        return None
    if used < BUSY_PERCENT and situation.readings.input_wait_percent is not None:
        found = f"GPU:{gpu.index} is idle {100 - used:.0f} % of the time, though not for lack of input"
    elif used >= SM_ACTIVE_PERCENT and active is not None and active < SM_ACTIVE_PERCENT:
        found = f"GPU:{gpu.index} is in use {used:.0f} % of the time, but {active:.0f} % of its multiprocessors work"
    else:
        return None
    return f"{found}: {SHORT_KERNELS.name}. {SHORT_KERNELS.remedy}"


def _full_memory(situation: Situation, gpu: GpuSample) -> str | None:
    used, total = gpu.gpu_memory_used_mib, gpu.gpu_memory_total_mib
    asked = situation.metric in _MEMORY_ABOVE
    if used is None or not total or used <= FULL_SHARE * total or not (situation.memory_grows or asked):
        return None
    text = f"the memory of GPU:{gpu.index} is nearly full ({used:,.0f} of {total:,.0f} MiB). {FULL_MEMORY.remedy}"
    if situation.memory_grows:
        return text
    return (
        f"{text} TensorFlow takes nearly all of it at the start, needed or not, unless tfopt.memory.set_growth() is on."
    )


def _unknown(readings: Readings, gpus: Sequence[GpuSample]) -> Iterator[str]:
    """Names of missing readings that would have helped."""
    if readings.input_wait_percent is None:
        yield "input_wait_percent"
    for name in ("gpu_utilization_percent", "sm_active_percent", "throttle_reasons", "gpu_memory_others_mib"):
        if all(getattr(gpu, name) is None for gpu in gpus):
            yield name
