"""Devices that answer only a part of NVML's questions, function by function, as they were reported to.

`ok` is the number that a FakeGpu gives. Sources:

- MIG instance of an H100, driver 535.129.03: a published table of what each call answers. From driver 550 on the
  utilisation is answered too. Nothing was reported about energy and throttle reasons; taken for not supported. GPM is
  asked through the GPU that the instance is a part of.
- WSL: dask/distributed#5342 and nvidia-docker#1458, #1542 (`nvidia-smi -q`), microsoft/WSL#7162. Nothing was reported
  about the energy counter; taken for not supported.
- GB10: nvitop#208 and dra-driver-nvidia-gpu#1073 (memory), nvtop#426 (processes are listed with their memory), the
  vendor's forum, topic 367851 (memory clock). Nothing was reported about PCIe traffic, which an integrated GPU has
  not; taken for not supported.
- Nothing was reported about power limit, ECC and events of these three; taken for not supported, but for GB10's Xids.
- A GPU before Hopper, and a driver before 525: nvml.h says since when each function is there.
"""

import pynvml
from fake_nvml import GPM, FakeGpu

ok = 0
none = pynvml.NVML_ERROR_NOT_SUPPORTED
invalid = pynvml.NVML_ERROR_INVALID_ARGUMENT
missing = pynvml.NVML_ERROR_FUNCTION_NOT_FOUND

DEVICES = ("mig", "wsl", "gb10", "ampere", "old_driver")

# fmt: off
ANSWERS = {
    #                                              mig      wsl   gb10  ampere  old_driver
    "nvmlDeviceGetMemoryInfo":                    (ok,      ok,   none, ok,     ok),
    "nvmlDeviceGetUtilizationRates":              (none,    none, ok,   ok,     ok),
    "nvmlDeviceGetPowerUsage":                    (none,    ok,   ok,   ok,     ok),
    "nvmlDeviceGetTotalEnergyConsumption":        (none,    none, ok,   ok,     ok),
    "nvmlDeviceGetTemperature":                   (invalid, ok,   ok,   ok,     ok),
    "nvmlDeviceGetTemperatureV":                  (invalid, none, ok,   ok,     missing),
    "nvmlDeviceGetPcieThroughput":                (invalid, ok,   none, ok,     ok),
    "nvmlDeviceGetCurrentClocksEventReasons":     (invalid, ok,   ok,   ok,     missing),
    "nvmlDeviceGetCurrentClocksThrottleReasons":  (invalid, ok,   ok,   ok,     ok),
    "nvmlDeviceGetComputeRunningProcesses_v3":    (ok,      none, ok,   ok,     missing),
    "nvmlDeviceGetGraphicsRunningProcesses_v3":   (ok,      none, ok,   ok,     missing),
    "nvmlGpmQueryDeviceSupport":                  (ok,      none, none, ok,     missing),
    "nvmlDeviceGetEnforcedPowerLimit":            (none,    none, none, ok,     ok),
    "nvmlDeviceGetTotalEccErrors":                (none,    none, none, ok,     ok),
    "nvmlDeviceGetSupportedEventTypes":           (none,    none, ok,   ok,     ok),
    "nvmlDeviceGetMigMode":                       (invalid, none, none, ok,     ok),
}
CLOCKS = {
    "NVML_CLOCK_SM":                              (none,    ok,   ok,   ok,     ok),
    "NVML_CLOCK_MEM":                             (none,    ok,   none, ok,     ok),
}
# fmt: on


def machine(name):
    """The GPUs of a machine with this device, and the device's UUID."""
    column = DEVICES.index(name)
    device = FakeGpu(
        uuid=f"MIG-{name}" if name == "mig" else f"GPU-{name}",
        gpm=dict(GPM) if name == "mig" else None,
        instance_id=7,
        errors={function: row[column] for function, row in ANSWERS.items() if row[column] != ok},
        no_clocks={clock for clock, row in CLOCKS.items() if row[column] != ok},
    )
    return ([FakeGpu(gpm=dict(GPM), instances=[None, device])] if name == "mig" else [device]), device.uuid
