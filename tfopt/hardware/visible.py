"""Which of the machine's GPUs this process may use: CUDA_VISIBLE_DEVICES and MIG, as CUDA reads them."""

from collections.abc import Mapping, Sequence

from tfopt.hardware.nvml_values import Device
from tfopt.warn import warn_once


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES says "no GPU", so that the driver need not even be asked."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and _ends_list(value.split(",")[0].strip()) and not value.strip().startswith(",")


def visible(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Returns the devices that CUDA gives to a process with this environment, in CUDA's order.

    CUDA reads the list up to the first entry that names no device, and takes none at all if one is named twice. It
    uses one MIG instance in a process, and beside it no other GPU (NVIDIA MIG User Guide, "CUDA Device Enumeration").

    Args:
        devices: The machine's physical GPUs, in the order of their PCI bus ids.
        environ: Read for CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _one_instance([stand_in for device in devices for stand_in in _stand_in(device)])
    entries = [entry.strip() for entry in value.split(",")]
    chosen: list[Device] = []
    for position, entry in enumerate(entries):
        if _ends_list(entry) and (entry or position + 1 == len(entries)):
            break
        if _is_index(entry) and not _indices_known(devices, environ):
            _warn_order(value)
            return ()
        device = _named(entry, devices)
        if device is None:
            _warn_unknown(entry, value)
            break
        chosen.append(device)
    if len({device.uuid for device in chosen}) < len(chosen):
        _warn_twice(value)
        return ()
    return _one_instance(chosen)


def _ends_list(entry: str) -> bool:
    """Whether the entry is one of the ways to say "no more GPUs" on purpose."""
    return entry in ("", "NoDevFiles") or (entry.startswith("-") and entry[1:].isdecimal())


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdecimal()


def _indices_known(devices: Sequence[Device], environ: Mapping[str, str]) -> bool:
    """Whether CUDA's indices follow the PCI bus ids. By default CUDA puts the fastest first, by a rule of its own."""
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) <= 1


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """The one device that an index, a UUID or the beginning of a UUID names."""
    matches: Sequence[Device] = ()
    if _is_index(entry):
        matches = devices[int(entry) : int(entry) + 1] if len(entry) < 10 else ()
    elif entry.startswith("GPU-"):
        matches = [device for device in devices if device.uuid.startswith(entry)]
    elif entry.startswith("MIG-"):
        instances = [instance for device in devices for instance in device.instances or ()]
        matches = [instance for instance in instances if instance.uuid.startswith(entry)]
    exact = [device for device in matches if device.uuid == entry]
    matches = exact or matches
    stand_ins = _stand_in(matches[0]) if len(matches) == 1 else ()
    return stand_ins[0] if stand_ins else None


def _stand_in(device: Device) -> Sequence[Device]:
    """The device as CUDA sees it: with MIG mode on, its first instance, and without an instance nothing."""
    if device.instances is None:
        return (device,)
    if not device.instances:
        warn_once(
            f"no_mig_instance {device.uuid}",
            f"Expected a MIG instance on {device.name} ({device.uuid}), whose MIG mode is on. Found: none, so CUDA "
            "cannot use this GPU. What to do: create one (nvidia-smi mig -cgi … -C) or switch MIG mode off.",
        )
    return device.instances[:1]


def _one_instance(devices: Sequence[Device]) -> tuple[Device, ...]:
    instances = [device for device in devices if device.uuid.startswith("MIG-")]
    if not instances or len(devices) == 1:
        return tuple(devices)
    warn_once(
        "several_mig_instances",
        f"Expected one visible MIG instance, since CUDA uses one in a process and no other GPU beside it. Found: "
        f"{len(devices)} visible devices; {instances[0].uuid} is used. What to do: start one process per instance, "
        "each with that instance's UUID in CUDA_VISIBLE_DEVICES.",
    )
    return (instances[0],)


def _warn_order(value: str) -> None:
    warn_once(
        f"device_order {value}",
        f"Expected GPUs of one kind, or an order that is known. Found: unlike GPUs and CUDA_VISIBLE_DEVICES={value!r}; "
        "by default CUDA numbers the fastest first, by a rule that it does not tell, so no GPU is read. What to do: "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (nvidia-smi -L).",
    )


def _warn_unknown(entry: str, value: str) -> None:
    warn_once(
        f"unknown_entry {entry}",
        f"Expected CUDA_VISIBLE_DEVICES to name GPUs of this machine: indices, GPU-… or MIG-… UUIDs, or beginnings of "
        f"UUIDs that one device has. Found: {entry!r} in {value!r}, which names none; CUDA ignores it and what "
        "follows. What to do: correct it (nvidia-smi -L lists the UUIDs).",
    )


def _warn_twice(value: str) -> None:
    warn_once(
        f"named_twice {value}",
        f"Expected CUDA_VISIBLE_DEVICES to name each GPU once. Found: {value!r} names one twice, and CUDA then shows "
        "none. What to do: remove the repetition.",
    )
