"""One row of a sampler: what one GPU and the host said at one moment."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment, and the host beside it. None: unknown, never 0.

    On a machine without a GPU, `index`, `uuid` and the GPU's fields are None and the host's are there.

    Attributes:
        time_seconds: Wall clock, seconds since 1970.
        elapsed_seconds: Seconds since the sampler was started, on a monotonic clock.
        index: The GPU's place among the process's GPUs, as in TensorFlow's `GPU:index`.
        uuid: The GPU's UUID.
        gpu_utilization_percent: Share of time in which any kernel ran. It says nothing about how full the GPU was.
        sm_active_percent: Share of the multiprocessors that were busy, on average since the sample before. This and the
            other readings "since the sample before" come from the GPU's performance monitor (GPM: Hopper and later);
            the first sample has none, nor has one after a failed reading.
        sm_occupancy_percent: Warps in flight, of those that the multiprocessors could hold, since the sample before.
        tensor_active_percent: Share of time in which the tensor cores worked, in any data type, since the sample
            before.
        dram_active_percent: Bandwidth of the GPU's memory in use, of what it could be, since the sample before.
        gpu_memory_used_mib: Memory taken by all processes and by the driver.
        gpu_memory_total_mib: All of the memory.
        gpu_memory_process_mib: Memory taken by this process. None where the driver does not list it, as in containers
            whose process numbers are not the driver's, or does not say how much it takes.
        gpu_memory_others_mib: Memory taken by all other processes. In a container, by those that the driver lists
            beside this one; None if it lists no other, since there may be some.
        gpu_power_watts: Power drawn by the whole board.
        gpu_energy_joules: Energy since the driver was loaded. Its differences are better than sums of power.
        sm_clock_mhz: Clock of the multiprocessors.
        memory_clock_mhz: Clock of the memory.
        gpu_temperature_celsius: Temperature of the chip.
        pcie_rx_mib_per_second: Received by the GPU over PCIe: with GPM since the sample before, without it in a window
            of about 20 ms.
        pcie_tx_mib_per_second: Sent by the GPU over PCIe, likewise.
        nvlink_rx_mib_per_second: Received by the GPU over all of its NVLinks, since the sample before.
        nvlink_tx_mib_per_second: Sent by the GPU over all of its NVLinks, since the sample before.
        throttle_reasons: What holds the clocks back: "power_cap", "thermal", "hw_slowdown", … Empty: nothing.
        host_cpu_percent: How busy the CPUs were that this process may use, since the sample before.
        host_memory_used_mib: Memory of the machine that is not available.
        process_memory_mib: Memory of this process (resident set).
        disk_read_mib_per_second: Read by this process from disks (what the page cache did not hold), since the sample
            before.
    """

    time_seconds: float
    elapsed_seconds: float
    index: int | None = None
    uuid: str | None = None
    gpu_utilization_percent: int | None = None
    sm_active_percent: float | None = None
    sm_occupancy_percent: float | None = None
    tensor_active_percent: float | None = None
    dram_active_percent: float | None = None
    gpu_memory_used_mib: float | None = None
    gpu_memory_total_mib: float | None = None
    gpu_memory_process_mib: float | None = None
    gpu_memory_others_mib: float | None = None
    gpu_power_watts: float | None = None
    gpu_energy_joules: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    gpu_temperature_celsius: int | None = None
    pcie_rx_mib_per_second: float | None = None
    pcie_tx_mib_per_second: float | None = None
    nvlink_rx_mib_per_second: float | None = None
    nvlink_tx_mib_per_second: float | None = None
    throttle_reasons: tuple[str, ...] | None = None
    host_cpu_percent: float | None = None
    host_memory_used_mib: float | None = None
    process_memory_mib: float | None = None
    disk_read_mib_per_second: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values."""
        reasons = None if self.throttle_reasons is None else list(self.throttle_reasons)
        return asdict(self) | {"throttle_reasons": reasons}
