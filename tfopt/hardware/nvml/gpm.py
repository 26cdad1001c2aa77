"""GPM, NVML's GPU performance monitoring: how busy a GPU's multiprocessors, memory and links were between two samples.

It needs Hopper and driver 525, or later, and works on MIG instances. Source of names and units: nvml.h and the NVML API
reference, "GPM Functions".
"""

import contextlib
from collections.abc import Callable
from typing import Any

from tfopt.hardware.nvml.gpu_reading import Ask

# NVML updates the counters at this interval, and requires more time between two samples.
REFRESH_SECONDS = 0.1

# NVML's metric for each field of a reading, in the field's own unit: percent or MiB per second.
METRICS = {
    "sm_active_percent": "NVML_GPM_METRIC_SM_UTIL",
    "sm_occupancy_percent": "NVML_GPM_METRIC_SM_OCCUPANCY",
    "tensor_active_percent": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
    "dram_active_percent": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "pcie_rx_mib_per_second": "NVML_GPM_METRIC_PCIE_RX_PER_SEC",
    "pcie_tx_mib_per_second": "NVML_GPM_METRIC_PCIE_TX_PER_SEC",
    "nvlink_rx_mib_per_second": "NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC",
    "nvlink_tx_mib_per_second": "NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC",
}


class Gpm:
    """The performance monitor of one GPU or MIG instance. Use it in NVML's thread only."""

    def __init__(self, vendor: Any, ask: Ask, handle: Any, *, mig: bool, clock: Callable[[], float]) -> None:
        self._vendor = vendor
        self._ask = ask
        self._handle = handle
        self._mig = mig
        self._clock = clock
        self._instance: int | None = None
        self._supported: bool | None = None
        # Two buffers take turns: the older sample is in the first.
        self._buffers: list[Any] = []
        self._taken_at: float | None = None
        self._last: dict[str, float | None] | None = None

    def read(self, *, restart: bool) -> dict[str, float | None] | None:
        """Takes a sample and returns the metrics since the last one, by field.

        Empty for the first sample, and with `restart`, which forgets a sample taken for another caller; None if the
        device has no GPM or the sample failed. Within 0.1 s of a sample, returns the last metrics again.
        """
        now = self._clock()
        if not restart and self._taken_at is not None and now - self._taken_at <= REFRESH_SECONDS:
            return self._last
        first = restart or self._taken_at is None
        self._taken_at = None
        if not (self._is_supported() and self._take()):
            return None
        self._taken_at = now
        self._last = {} if first else self._metrics()
        return self._last

    def close(self) -> None:
        """Frees the buffers."""
        for buffer in self._buffers:
            with contextlib.suppress(self._vendor.NVMLError):
                self._vendor.nvmlGpmSampleFree(buffer)
        self._buffers = []
        self._taken_at = None

    def _is_supported(self) -> bool:
        """Whether the device has GPM. Asks again until the driver answers."""
        if self._supported is None:
            if self._mig and self._instance is None and not self._find_instance():
                return False
            support = self._ask("nvmlGpmQueryDeviceSupport", self._handle)
            self._supported = None if support is None else bool(support.isSupportedDevice)
        return bool(self._supported)

    def _find_instance(self) -> bool:
        """Finds the GPU of a MIG instance, through which it is sampled."""
        parent = self._ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", self._handle)
        instance = self._ask("nvmlDeviceGetGpuInstanceId", self._handle)
        if parent is None or instance is None:
            return False
        self._handle, self._instance = parent, instance
        return True

    def _take(self) -> bool:
        """Takes a sample into the buffer that holds the older one."""
        while len(self._buffers) < 2:
            buffer = self._ask("nvmlGpmSampleAlloc")
            if buffer is None:
                return False
            self._buffers.append(buffer)
        self._buffers.reverse()
        newer = self._buffers[1]
        if self._instance is None:
            return self._ask("nvmlGpmSampleGet", self._handle, newer) is not None
        return self._ask("nvmlGpmMigSampleGet", self._handle, self._instance, newer) is not None

    def _metrics(self) -> dict[str, float | None] | None:
        request = self._vendor.c_nvmlGpmMetricsGet_t(
            version=self._vendor.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(METRICS),
            sample1=self._buffers[0],
            sample2=self._buffers[1],
        )
        for name, metric in zip(METRICS.values(), request.metrics, strict=False):
            metric.metricId = getattr(self._vendor, name)
        if self._ask("nvmlGpmMetricsGet", request) is None:
            return None
        return {
            field: None if metric.nvmlReturn else float(metric.value)
            for field, metric in zip(METRICS, request.metrics, strict=False)
        }
