"""NVML's return codes: which ones mean that a field does not exist, and what to do about the others."""

from tfopt.errors import HardwareError

# nvmlReturn_t in NVIDIA's nvml.h. The numbers are part of NVML's ABI, so pynvml need not be loaded here.
UNINITIALIZED = 1
TIMEOUT = 10

# A machine without an NVIDIA GPU, which is not an error.
NO_DRIVER = frozenset({"driver_not_loaded", "library_not_found"})

_CHECK_DRIVER = "Run nvidia-smi: if it fails too, repair the driver."
_RETRY = "Nothing if it passes. If it persists, run nvidia-smi; if that fails too, reload the driver or reboot."

# code: (cause, what was found, what to do)
_EXPLAINED: dict[int, tuple[str, str, str]] = {
    1: ("uninitialized", "NVML is not started", "Nothing: tfopt starts it again. Another library shut it down."),
    2: ("invalid_argument", "NVML rejected an argument as invalid", "Update the driver or nvidia-ml-py to match."),
    3: ("not_supported", "the device does not support this", "Nothing: the device does not have it."),
    4: (
        "no_permission",
        "this user lacks permission",
        "Give the process access to /dev/nvidia* (in a container: --gpus or the device plug-in), or ask an "
        "administrator to lift the restriction.",
    ),
    5: ("already_initialized", "NVML is already started", _RETRY),
    6: ("not_found", "there is no such device", "Run nvidia-smi -L: a GPU or MIG instance was removed."),
    7: ("insufficient_size", "the answer did not fit", "Update nvidia-ml-py to match the driver."),
    8: ("insufficient_power", "a GPU lacks external power", "Check the power cables of the GPU."),
    9: (
        "driver_not_loaded",
        "NVIDIA's kernel driver is not loaded",
        "Install or load it (modprobe nvidia); in a container, start it with access to the GPUs.",
    ),
    10: ("timeout", "the driver gave up waiting for the device", _RETRY),
    11: ("irq_issue", "the kernel reports trouble with a GPU's interrupts", "Look for NVRM lines in dmesg; reboot."),
    12: (
        "library_not_found",
        "libnvidia-ml.so.1 is missing",
        "Install NVIDIA's driver; in a container, start it with the utility capability (NVIDIA_DRIVER_CAPABILITIES).",
    ),
    13: ("function_not_found", "the driver lacks this function", "Update the driver."),
    14: ("corrupted_inforom", "the GPU's infoROM is corrupted", "Run nvidia-smi -q; the card may need service."),
    15: ("gpu_is_lost", "the GPU fell off the bus", "Look for Xid lines in dmesg, then reset the GPU or reboot."),
    16: ("reset_required", "the GPU needs a reset", "Stop what uses it and run nvidia-smi --gpu-reset, or reboot."),
    17: ("operating_system", "the operating system blocked it", "Check the container's or cgroup's device rules."),
    18: (
        "lib_rm_version_mismatch",
        "the driver's library and kernel module have different versions",
        "The driver was updated while loaded: reboot, or unload and load the nvidia modules; in a container, restart "
        "it.",
    ),
    19: ("in_use", "the GPU is in use", _RETRY),
    20: ("memory", "NVML had no memory left", "Free memory on the host."),
    21: ("no_data", "the device has no data for this", "Nothing: the device does not have it."),
    22: ("vgpu_ecc_not_supported", "ECC rules this out on a virtual GPU", "Ask the provider of the virtual GPU."),
    23: ("insufficient_resources", "the driver is out of resources", _RETRY),
    24: ("freq_not_supported", "the frequency is not supported", _CHECK_DRIVER),
    25: ("argument_version_mismatch", "driver and nvidia-ml-py do not match", "Update the older of the two."),
    26: ("deprecated", "the driver no longer offers this", "Update nvidia-ml-py."),
    27: ("not_ready", "the driver is not ready", _RETRY),
    28: ("gpu_not_found", "there is no such GPU", "Run nvidia-smi -L: the GPU was removed or is in another container."),
    29: ("invalid_state", "the device is in a state that rules this out", _RETRY),
    30: ("reset_type_not_supported", "this kind of reset is not supported", _CHECK_DRIVER),
    999: ("unknown", "the driver reports an internal error", "Look for NVRM and Xid lines in dmesg; " + _RETRY.lower()),
}


def _codes(*causes: str) -> frozenset[int]:
    return frozenset(code for code, (cause, *_) in _EXPLAINED.items() if cause in causes)


# The device, its driver or the library does not offer this. tfopt's arguments never vary, so INVALID_ARGUMENT means
# the same: MIG instances return it for what only whole GPUs have.
ABSENT = _codes(
    "invalid_argument",
    "not_supported",
    "not_found",
    "function_not_found",
    "no_data",
    "argument_version_mismatch",
    "deprecated",
)

# No other call to the device will succeed either.
GONE = _codes("uninitialized", "gpu_is_lost", "reset_required", "gpu_not_found")


class NvmlError(HardwareError):
    """NVML did not answer as expected. `cause` is a short name for the reason, and the key of its warning."""

    def __init__(self, cause: str, text: str):
        super().__init__(text)
        self.cause = cause


def explain(code: int, expected: str) -> NvmlError:
    """Returns the error for a return code."""
    cause, found, remedy = _EXPLAINED.get(code, (f"code_{code}", "an error that tfopt does not know", _CHECK_DRIVER))
    return NvmlError(cause, f"Expected {expected}. Found: {found} (NVML error {code}). What to do: {remedy}")
