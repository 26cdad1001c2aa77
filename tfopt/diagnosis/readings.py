"""What is read and not timed: what slows a training down from outside, and what the computation itself comes to."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress

import keras

from tfopt import hardware
from tfopt.causes.between_gpus import OTHERS_MIB
from tfopt.causes.catalogue import (
    CPU_QUOTA,
    CPUS_SHARED,
    FAR_CPUS,
    FLOAT32_PRODUCT,
    MIG_INSTANCE,
    OTHER_PROCESS,
    PCIE_LINK,
    SIZES,
    THROTTLED,
    WAITING_PERCENT,
    Cause,
)
from tfopt.causes.readings import SLOWED_BY, RunningMeans, Throttling
from tfopt.diagnosis.findings import Noticed
from tfopt.diagnosis.training import Training
from tfopt.hardware import Gpu, GpuSample, GpuSampler
from tfopt.hardware.host_activity import HostMeter, OtherProcesses
from tfopt.hardware.host_limits import usable_cpus
from tfopt.hardware.inventory import cpu_affinity, pcie_link
from tfopt.measure import StepTimes, matmul_tflops
from tfopt.model.flops import step_flops
from tfopt.model.products import LayerCall, layer_calls, matrix_products
from tfopt.precision import alignment
from tfopt.text import figure, listed, percent

_NAMED = 3
_LEAST_SHARE_PERCENT = 3.0  # of all multiply-adds
_COMPUTE_BOUND = 0.5
_PEAKS = {"float32": "tensorfloat32", "bfloat16": "bfloat16", "float16": "float16"}


@contextmanager
def readings(training: Training) -> Iterator[list[Noticed]]:
    """Reads the GPUs of a training and the host during a block; afterwards the list holds what was noticed."""
    noticed: list[Noticed] = []
    means, throttling, others, meter = RunningMeans(), Throttling(), OtherProcesses(), HostMeter()
    start = means.moment()
    meter.read()  # a reading is of the time since the one before

    def add(rows: tuple[GpuSample, ...]) -> None:
        for row in rows:
            means.add_gpu(row, throttling.reasons(row))

    gpus = _gpus_of(training)
    with GpuSampler(on_sample=add) if gpus else nullcontext():
        yield noticed
    noticed += _placed(gpus)
    share, stopped = others.cpu_percent(), meter.read().host_cpu_throttled_percent
    if share is not None and share >= WAITING_PERCENT:
        noticed.append(
            _noticed(CPUS_SHARED, f"Other processes used {share:.0f} % of the CPU time during the diagnosis.")
        )
    if stopped is not None and stopped >= WAITING_PERCENT:
        noticed.append(_noticed(CPU_QUOTA, f"The CPU quota stopped this process in {stopped:.0f} % of its periods."))
    found = means.since(start)
    used = {gpu.index for gpu in gpus}
    for gpu in (gpu for gpu in found.gpus if gpu.index in used):
        for reason in gpu.throttle_reasons or ():
            cause = THROTTLED[SLOWED_BY[reason]]
            throttled = f"GPU:{gpu.index} was throttled by {cause.name} ({reason}) during the diagnosis."
            noticed.append(Noticed(f"throttled by {cause.name}", throttled, cause.remedy))
        if gpu.index is not None and (gpu.gpu_memory_others_mib or 0) >= OTHERS_MIB:
            held = f"Another process holds {gpu.gpu_memory_others_mib:,.0f} MiB of GPU:{gpu.index}."
            noticed.append(_noticed(OTHER_PROCESS, held))


def _gpus_of(training: Training) -> list[Gpu]:
    """The GPUs that the model computes on."""
    strategy = training.model._distribute_strategy
    names = ["GPU:0"] if strategy is None else strategy.extended.worker_devices
    used = {int(name.rpartition(":")[2]) for name in names if "GPU" in name}
    return [gpu for gpu in hardware.gpus() if gpu.index in used]


def _placed(gpus: Sequence[Gpu]) -> Iterator[Noticed]:
    """How the GPUs are connected to the CPUs that this process may use."""
    known = [near for near in map(cpu_affinity, gpus) if near is not None]
    usable, near = frozenset(usable_cpus()), frozenset().union(*known)
    if known and (far := usable - near):
        text = f"{len(far)} of the {len(usable)} CPUs of this process are in another NUMA node than its GPUs."
        remedy = FAR_CPUS.remedy.format(near=_ranges(usable & near or near))
        yield Noticed(FAR_CPUS.name, text, remedy)
    for gpu in gpus:
        link = pcie_link(gpu)
        # Under load, which has just ended: an idle GPU lowers the generation to save power.
        if link is not None and (link.generation, link.lanes) != (link.best_generation, link.best_lanes):
            best = f"PCIe {link.best_generation}.0 ×{link.best_lanes}"
            yield _noticed(PCIE_LINK, f"GPU:{gpu.index} runs at {link}; card and slot allow {best}.")
        if gpu.mig:
            yield _noticed(MIG_INSTANCE, f"GPU:{gpu.index} is a MIG instance, a part of a GPU.")


def tensor_cores(training: Training) -> Iterator[Noticed]:
    """What keeps layers off the fast Tensor Core kernels, on a GPU that has Tensor Cores: sizes, and float32."""
    gpus = _gpus_of(training)
    if not any(gpu.compute_capability and gpu.compute_capability >= (7, 0) for gpu in gpus):
        return
    yield from _in_float32(training)
    with suppress(ValueError):  # no layer multiplies matrices, or a model whose layers cannot be looked into
        found = alignment(training.model, max(1, training.examples // len(gpus))).misses
        large = [miss for miss in found if miss.share_percent is None or miss.share_percent >= _LEAST_SHARE_PERCENT]
        for miss in large[:_NAMED]:
            where = f"{miss.dimension.capitalize()} {miss.size:,} in {listed(miss.layers, 2)}"
            yield _noticed(SIZES, f"{where}: the next multiple is {miss.next_size:,}.")


def _in_float32(training: Training) -> Iterator[Noticed]:
    """Layers that multiply in float32 where most of the model's products are in 16 bits."""
    sizes: Counter[str] = Counter()
    wide: Counter[str] = Counter()
    for call, size in _multiply_adds(training.model, training.examples):
        sizes[call.dtype] += size
        if call.dtype == "float32":
            wide[call.path] += size
    total = sum(sizes.values())
    if sizes["bfloat16"] + sizes["float16"] < sizes["float32"]:
        return
    for path, size in wide.most_common(_NAMED):
        if 100 * size >= _LEAST_SHARE_PERCENT * total:
            share = percent(size / total)
            yield _noticed(FLOAT32_PRODUCT, f"{path}, with {share} of the multiply-adds, multiplies in float32.")


def _ranges(cpus: Iterable[int]) -> str:
    """Numbers as taskset takes them, such as "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][-1] + 1:
            runs[-1].append(cpu)
        else:
            runs.append([cpu])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _noticed(cause: Cause, evidence: str) -> Noticed:
    return Noticed(cause.name, evidence, cause.remedy)


def describe(training: Training, floor: StepTimes, dtype: str | None = None) -> str:
    """Says what the computation reaches of a large matrix product's rate, and which layers cost most.

    Args:
        training, floor: The training, and its step with all causes taken away.
        dtype: What that step computes in, if not in the training's own.
    """
    counted = step_flops(training.model, training.graph, [], training.examples)
    if counted.per_example is None:
        unknown = listed(counted.unknown, 2) or "no matrix products were found"
        return f"Its FLOPs cannot be counted: {unknown}."
    tflops = sum(counted.by_dtype.values()) / floor.median_ms / 1e9
    peak = matmul_tflops(_PEAKS.get(dtype or counted.dtype or "float32", "tensorfloat32"))
    peak *= max(1, len(_gpus_of(training)))
    share = tflops / peak
    bound = (
        "the matrix products set the pace, so a faster device, or fewer FLOPs, is what helps"
        if share >= _COMPUTE_BOUND
        else "the rest of the time goes into moving memory, small operations and layers that are not matrix products"
    )
    costly = _costliest(training.model, training.examples)
    # Above 1 where the machine was busier while the peak was measured.
    reached = f"{percent(share)} of the" if share < 1 else "no less than the"
    return (
        f"The computation runs at {_rate(tflops)}, {reached} {_rate(peak)} that a large matrix product reaches here: "
        f"{bound}.{costly}"
    )


def _rate(tflops: float) -> str:
    return next(
        f"{figure(tflops * factor)} {unit}FLOP/s"
        for unit, factor in (("T", 1), ("G", 1e3), ("M", 1e6), ("k", 1e9))
        if tflops * factor >= 1 or unit == "k"
    )


def _costliest(model: keras.Model, examples: int) -> str:
    sizes: Counter[str] = Counter()
    for call, size in _multiply_adds(model, examples):
        sizes[call.path] += size
    total = sum(sizes.values())
    if not total:
        return ""
    named = [f"{path} ({percent(size / total)})" for path, size in sizes.most_common(_NAMED)]
    return f" Most of its FLOPs are in {', '.join(named)}."


def _multiply_adds(model: keras.Model, examples: int) -> Iterator[tuple[LayerCall, int]]:
    """Each call of a layer that multiplies matrices, and how many numbers it multiplies and adds, at least."""
    try:
        shapes = [tuple(tensor.shape) for tensor in model.inputs]
    except (AttributeError, ValueError):
        shapes = []
    for call in layer_calls(model, examples, shapes):
        products = matrix_products(call)
        if products is not None:
            yield call, products.at_least()
