"""What slows a training down from outside: other processes, throttling, quotas. It is read while experiments run."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tfopt import hardware
from tfopt.causes.between_gpus import OTHERS_MIB
from tfopt.causes.known_causes import (
    CPU_QUOTA,
    CPUS_SHARED,
    OTHER_PROCESS,
    THROTTLED,
    WAITING_PERCENT,
    Cause,
)
from tfopt.causes.readings import SLOWED_BY, RunningMeans, Throttling
from tfopt.diagnosis.findings import Noticed
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host_activity import HostMeter, OtherProcesses


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


def _noticed(cause: Cause, evidence: str) -> Noticed:
    return Noticed(cause.name, evidence, cause.remedy)
