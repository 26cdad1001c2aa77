"""What slows a training down from outside: other processes, throttling, far CPUs. It is read while experiments run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from tfopt import hardware
from tfopt.causes.between_gpus import OTHERS_MIB
from tfopt.causes.catalogue import (
    CPU_QUOTA,
    CPUS_SHARED,
    FAR_CPUS,
    FULL_MEMORY,
    FULL_SHARE,
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
from tfopt.precision import alignment
from tfopt.text import listed


@contextmanager
def readings() -> Iterator[list[Noticed]]:
    """Reads the GPUs and the host during a block; afterwards the list holds what was noticed."""
    noticed: list[Noticed] = []
    means, throttling, others, meter = RunningMeans(), Throttling(), OtherProcesses(), HostMeter()
    start = means.moment()
    meter.read()  # a reading is of the time since the one before

    def add(rows: tuple[GpuSample, ...]) -> None:
        for row in rows:
            means.add_gpu(row, throttling.reasons(row))

    with GpuSampler(on_sample=add) if hardware.gpus() else nullcontext():
        yield noticed
    for each in hardware.gpus():
        noticed += _placed(each)
    share, stopped = others.cpu_percent(), meter.read().host_cpu_throttled_percent
    if share is not None and share >= WAITING_PERCENT:
        noticed.append(_noticed(CPUS_SHARED, f"Other processes took {share:.0f} % of the CPUs meanwhile."))
    if stopped is not None and stopped >= WAITING_PERCENT:
        noticed.append(_noticed(CPU_QUOTA, f"The CPU quota stopped this process in {stopped:.0f} % of its periods."))
    found = means.since(start)
    for gpu in found.gpus:
        for reason in gpu.throttle_reasons or ():
            cause = THROTTLED[SLOWED_BY[reason]]
            noticed.append(_noticed(cause, f"GPU:{gpu.index} was throttled by {cause.name} ({reason}) meanwhile."))
        if gpu.index is not None and (gpu.gpu_memory_others_mib or 0) >= OTHERS_MIB:
            held = f"Another process holds {gpu.gpu_memory_others_mib:,.0f} MiB of GPU:{gpu.index}."
            noticed.append(_noticed(OTHER_PROCESS, held))
        peak, total = gpu.gpu_memory_allocated_peak_mib, gpu.gpu_memory_total_mib
        if peak and total and peak >= FULL_SHARE * total:
            noticed.append(
                _noticed(FULL_MEMORY, f"Tensors took {peak:,.0f} of the {total:,.0f} MiB of GPU:{gpu.index}.")
            )


def _placed(gpu: Gpu) -> Iterator[Noticed]:
    """How a GPU is connected to the CPUs that this process may use."""
    usable, near, link = frozenset(usable_cpus()), cpu_affinity(gpu), pcie_link(gpu)
    if near is not None and (far := usable - near):
        text = f"CPUs of this process on another socket than GPU:{gpu.index}: {len(far)} of {len(usable)}."
        remedy = FAR_CPUS.remedy.format(near=_ranges(usable & near or near))
        yield Noticed(FAR_CPUS.name, text, remedy)
    # Under load, which has just ended: an idle GPU lowers the generation to save power.
    if link is not None and (link.generation, link.lanes) != (link.best_generation, link.best_lanes):
        best = f"PCIe {link.best_generation}.0 ×{link.best_lanes}"
        yield _noticed(PCIE_LINK, f"GPU:{gpu.index} is connected by {link}, of {best} that are possible.")
    if gpu.mig:
        yield _noticed(MIG_INSTANCE, f"GPU:{gpu.index} is a MIG instance, a part of a GPU.")


def sizes(training: Training) -> Iterator[Noticed]:
    """The sizes of layers that keep them off the fast Tensor Core kernels, on a GPU that has Tensor Cores."""
    if not any(gpu.compute_capability and gpu.compute_capability >= (7, 0) for gpu in hardware.gpus()):
        return
    examples = training.examples // training.model.distribute_strategy.num_replicas_in_sync
    with suppress(ValueError):  # no layer multiplies matrices, or a model whose layers cannot be looked into
        for miss in alignment(training.model, max(1, examples)).misses:
            text = (
                f"{miss.dimension} {miss.size:,} in {listed(miss.layers, 2)}: the next multiple is {miss.next_size:,}."
            )
            yield Noticed(SIZES.name, f"{text[0].upper()}{text[1:]}", SIZES.remedy)


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
