"""What slows a training down from outside: other processes, throttling, quotas. It is read while experiments run."""

from collections.abc import Iterator
from contextlib import contextmanager

from tfopt.causes.between_gpus import OTHERS_MIB
from tfopt.causes.known_causes import (
    CPU_QUOTA,
    CPUS_SHARED,
    OTHER_PROCESS,
    THROTTLED,
    THROTTLED_PERCENT,
    WAITING_PERCENT,
    Cause,
)
from tfopt.causes.readings import RunningMeans, Throttling
from tfopt.diagnosis.findings import Noticed
from tfopt.hardware import GpuSample, GpuSampler
from tfopt.hardware.host_activity import OtherProcesses


@contextmanager
def readings() -> Iterator[list[Noticed]]:
    """Reads the GPUs and the host during a block; afterwards the list holds what was noticed."""
    noticed: list[Noticed] = []
    means, throttling, others = RunningMeans(), Throttling(), OtherProcesses()
    start = means.moment()
    stopped: list[float] = []  # the share of its quota's periods in which the process was stopped

    def add(rows: tuple[GpuSample, ...]) -> None:
        for row in rows:
            means.add_gpu(row, throttling.reasons(row))
            if row.host_cpu_throttled_percent is not None:
                stopped.append(row.host_cpu_throttled_percent)

    with GpuSampler(on_sample=add):
        yield noticed
    share = others.cpu_percent()
    if share is not None and share >= WAITING_PERCENT:
        noticed.append(_noticed(CPUS_SHARED, f"Other processes took {share:.0f} % of the CPUs meanwhile."))
    if stopped and (quota := sum(stopped) / len(stopped)) >= WAITING_PERCENT:
        noticed.append(_noticed(CPU_QUOTA, f"The CPU quota stopped this process in {quota:.0f} % of its periods."))
    found = means.since(start)
    if found.throttled_percent is not None and found.throttled_percent >= THROTTLED_PERCENT:
        evidence = f"The GPU's clocks were held back in {found.throttled_percent:.0f} % of the time."
        noticed.append(_noticed(THROTTLED["heat or power"], evidence))
    for gpu in found.gpus:
        if gpu.index is not None and (gpu.gpu_memory_others_mib or 0) >= OTHERS_MIB:
            held = f"Another process holds {gpu.gpu_memory_others_mib:,.0f} MiB of GPU:{gpu.index}."
            noticed.append(_noticed(OTHER_PROCESS, held))


def _noticed(cause: Cause, evidence: str) -> Noticed:
    return Noticed(cause.name, evidence, cause.remedy)
