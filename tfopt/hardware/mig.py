"""The MIG instances of this machine, of which a process may use one."""

from tfopt.hardware import nvml
from tfopt.hardware.nvml_errors import NO_DRIVER, NvmlError
from tfopt.warn import warn_once


def mig_instances() -> tuple[str, ...]:
    """Returns the UUIDs of all MIG instances, in the order of their GPUs, to give each process one of its own.

    `gpus()` names only the one that CUDA would take. Empty on a machine without MIG, and where the driver does not
    answer.

    Example:
        >>> all(uuid.startswith("MIG-") for uuid in mig_instances())
        True
    """
    door = nvml.door()
    try:
        devices = door.call(door.devices)
    except NvmlError as error:
        if error.cause not in NO_DRIVER:
            warn_once(error.cause, str(error))
        return ()
    return tuple(instance.uuid for device in devices for instance in device.instances or ())
