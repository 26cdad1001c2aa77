"""What GPUs show when they are compared with each other: some that no replica uses, or one that the others wait for."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from tfopt.causes.readings import SLOWED_BY
from tfopt.hardware import GpuSample
from tfopt.text import listed

# More than a display or a monitoring tool takes of a GPU that otherwise idles.
_AT_WORK_PERCENT = 2.0
# More than the CUDA context of an idle process takes: a few hundred MiB.
OTHERS_MIB = 1024.0
# A clock that much lower is no scatter between boards of one model.
_SLOW_CLOCK = 0.85
# That much more at work than the others: waiting in an all-reduce takes a few multiprocessors and little power.
_BUSIER_PERCENT = 20.0
_BUSIER_POWER = 1.25
# No step has ended, and yet kernels run nearly all the time.
_SPINS_PERCENT = 95.0
_FEW_SMS_PERCENT = 50.0
_NAMED = 8


@dataclass(frozen=True, slots=True)
class Replicas:
    """How a model is spread over devices."""

    here: int
    """Replicas in this process."""
    everywhere: int
    """Replicas of all workers."""
    strategy: str | None = None
    """The class of its tf.distribute strategy; None: it has none."""
    visible: frozenset[int] | None = None
    """The GPUs that TensorFlow may use, as in `GPU:index`; None: unknown."""


@dataclass(frozen=True, slots=True)
class Unused:
    """GPUs that TensorFlow may use and that do nothing."""

    idle: tuple[int, ...]
    at_work: tuple[int, ...]
    mistake: bool
    """Whether nothing was done to use more than one GPU. Otherwise it may be meant so."""
    text: str
    """What is found, with the remedy if it is a mistake."""


def unused_gpus(gpus: Sequence[GpuSample], replicas: Replicas | None) -> Unused | None:
    """Returns the GPUs without a replica that idle while others work; None if there are none or too little is known.

    A GPU that another process uses is left out, as is one that TensorFlow must not use.
    """
    seen = _seen(gpus, replicas)
    busy = [gpu for gpu in seen if (gpu.gpu_utilization_percent or 0.0) >= _AT_WORK_PERCENT]
    # Those where another process computes may be its own.
    at_work = [gpu for gpu in busy if not _shared(gpu)] or busy
    idle = [gpu for gpu in seen if gpu not in busy and not _shared(gpu)]
    if replicas is None or not at_work or not idle or replicas.here > len(at_work):
        return None
    mistake = replicas.strategy is None and len(at_work) == 1
    found = f"{len(at_work)} of {len(seen)} visible GPUs at work ({names(at_work)}), {names(idle)} idle"
    of = f"the model's {replicas.strategy}" if replicas.strategy else "the model, without a tf.distribute strategy,"
    count = f"{replicas.here} replica{'' if replicas.here == 1 else 's'}"
    text = f"{found}: {of} has {count}{'' if replicas.here == replicas.everywhere else ' in this process'}"
    if mistake:
        text += (
            ". Build and compile it under tfopt.distribute.strategy() or a tf.distribute.MirroredStrategy, or hide the "
            f"others (CUDA_VISIBLE_DEVICES={at_work[0].index})."
        )
    else:
        text += ". That is fine if intended; hide the others to free them."
    return Unused(_indices(idle), _indices(at_work), mistake, text)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A GPU that the others of a strategy wait for."""

    index: int
    text: str
    """How it differs from the others, and the likely reason with what to do."""


def straggler(gpus: Sequence[GpuSample], replicas: Replicas | None) -> Straggler | None:
    """Returns the GPU of a strategy that is slower than the others; None if there is none or too little is known.

    In a step all GPUs wait for the slowest one. Its clock is lower than the others' median, or it works while they
    wait: more of its multiprocessors are active (without that reading: it draws more power), or it is busy longer.
    """
    if replicas is None or replicas.strategy is None or replicas.here < 2:
        return None
    working = [gpu for gpu in _seen(gpus, replicas) if (gpu.gpu_utilization_percent or 0.0) >= _AT_WORK_PERCENT]
    if len(working) != replicas.here:
        return None
    for found in (_lowest_clock(working), _busiest(working)):
        if found is not None:
            gpu, differs = found
            return Straggler(gpu.index or 0, f"the other GPUs wait for GPU:{gpu.index}, {differs}. {_reason(gpu)}")
    return None


def waits_in_all_reduce(gpus: Sequence[GpuSample], replicas: Replicas | None) -> bool:
    """Whether GPUs of several replicas, in a step that does not end, do nothing but wait for another replica.

    NCCL's kernels run while they wait, on a few multiprocessors.
    """
    known = [gpu for gpu in gpus if gpu.gpu_utilization_percent is not None]
    waiting = [gpu for gpu in known if (gpu.gpu_utilization_percent or 0.0) >= _SPINS_PERCENT and _few_at_work(gpu)]
    # All but those that are lost: one of several replicas may have stopped here.
    return replicas is not None and replicas.everywhere > 1 and bool(waiting) and 2 * len(waiting) > len(known)


def names(gpus: Sequence[GpuSample]) -> str:
    """Names GPUs, those in a row by the first and the last.

    Example:
        >>> names([GpuSample(0.0, 0.0, index=index) for index in (0, 2, 3, 4)])
        'GPU:0, GPU:2 to GPU:4'
    """
    runs: list[list[int]] = []
    for index in _indices(gpus):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    parts = [
        ", ".join(f"GPU:{one}" for one in run) if len(run) < 3 else f"GPU:{run[0]} to GPU:{run[-1]}" for run in runs
    ]
    return listed(parts, _NAMED)


def _indices(gpus: Sequence[GpuSample]) -> tuple[int, ...]:
    return tuple(gpu.index for gpu in gpus if gpu.index is not None)


def _seen(gpus: Sequence[GpuSample], replicas: Replicas | None) -> list[GpuSample]:
    """The GPUs that TensorFlow may use, with a known utilisation."""
    visible = None if replicas is None else replicas.visible
    return [
        gpu for gpu in gpus if gpu.gpu_utilization_percent is not None and (visible is None or gpu.index in visible)
    ]


def _shared(gpu: GpuSample) -> bool:
    return (gpu.gpu_memory_others_mib or 0.0) >= OTHERS_MIB


def _few_at_work(gpu: GpuSample) -> bool:
    return gpu.sm_active_percent is None or gpu.sm_active_percent < _FEW_SMS_PERCENT


def _lowest_clock(gpus: Sequence[GpuSample]) -> tuple[GpuSample, str] | None:
    clocks = [gpu.sm_clock_mhz for gpu in gpus]
    if any(clock is None for clock in clocks):
        return None
    slowest = min(gpus, key=lambda gpu: gpu.sm_clock_mhz or 0)
    usual = median(gpu.sm_clock_mhz or 0 for gpu in gpus if gpu is not slowest)
    if (slowest.sm_clock_mhz or 0) >= _SLOW_CLOCK * usual:
        return None
    return slowest, f"whose clock is {slowest.sm_clock_mhz:,.0f} MHz (the others' median: {usual:,.0f})"


def _busiest(gpus: Sequence[GpuSample]) -> tuple[GpuSample, str] | None:
    for name, what, unit, margin in (
        ("sm_active_percent", "whose multiprocessors are active", "%", _BUSIER_PERCENT),
        ("gpu_utilization_percent", "which is busy", "%", _BUSIER_PERCENT),
        ("gpu_power_watts", "which draws", "W", 0.0),
    ):
        values = {index: value for index, gpu in enumerate(gpus) if (value := getattr(gpu, name)) is not None}
        if len(values) < len(gpus):
            continue
        most = max(values, key=lambda index: values[index])
        usual = median(value for index, value in values.items() if index != most)
        if values[most] > max(usual + margin, usual * _BUSIER_POWER):
            return gpus[most], f"{what} {values[most]:.0f} {unit} (the others' median: {usual:.0f} {unit})"
        if name == "sm_active_percent":
            return None  # it says more than the others
    return None


def _reason(gpu: GpuSample) -> str:
    for reason in gpu.throttle_reasons or ():
        if reason in SLOWED_BY:
            return f"It is throttled by {SLOWED_BY[reason]}: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER shows it."
    if _shared(gpu):
        return (
            f"Another process holds {gpu.gpu_memory_others_mib:,.0f} MiB of its memory and may compute there: "
            "nvidia-smi names it."
        )
    return (
        "Neither throttling nor another process was seen there: compare its clock limits (nvidia-smi -q -d CLOCK), its "
        "PCIe link (nvidia-smi --query-gpu=index,pcie.link.gen.current,pcie.link.width.current --format=csv) and its "
        "share of the batch with the others'."
    )
