"""Selects the GPUs that this process may use, reading CUDA_VISIBLE_DEVICES and MIG as CUDA does."""

from collections.abc import Mapping, Sequence

from tfopt.hardware.nvml.gpu_reading import Device
from tfopt.warn import warn_once


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether CUDA_VISIBLE_DEVICES says "no GPU", so that the driver need not be asked."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    return value is not None and _ends_list(value.split(",")[0].strip()) and not value.strip().startswith(",")


def visible(devices: Sequence[Device], environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Returns the devices that CUDA gives to a process with this environment, in CUDA's order.

    CUDA reads the list up to the first entry that names no device, and uses no device at all if one is named twice. A
    process that uses a MIG instance can use no other device (NVIDIA MIG User Guide, "CUDA Device Enumeration").
    `devices` are the machine's physical GPUs, ordered by PCI bus id.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return _one_instance([seen for device in devices for seen in _as_cuda_sees(device)])
    entries = [entry.strip() for entry in value.split(",")]
    chosen: list[Device] = []
    for position, entry in enumerate(entries):
        if _ends_list(entry) and (entry or position + 1 == len(entries)):
            break
        if _is_index(entry) and not _indices_known(devices, environ):
            warn_once(
                f"device_order {value}",
                f"Expected GPUs of one model, or a known order. Found: several models and CUDA_VISIBLE_DEVICES="
                f"{value!r}; by default CUDA numbers the fastest first, by an undocumented rule, so no GPU is read. "
                "What to do: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name the GPUs by UUID (nvidia-smi -L).",
            )
            return ()
        device = _named(entry, devices)
        if device is None:
            warn_once(
                f"unknown_entry {entry}",
                "Expected CUDA_VISIBLE_DEVICES to name GPUs of this machine: indices, GPU-… or MIG-… UUIDs, or "
                f"prefixes of UUIDs that match one device. Found: {entry!r} in {value!r}, which names none; CUDA "
                "ignores it and everything after it. What to do: correct it (nvidia-smi -L lists the UUIDs).",
            )
            break
        chosen.append(device)
    if len({device.uuid for device in chosen}) < len(chosen):
        warn_once(
            f"named_twice {value}",
            f"Expected CUDA_VISIBLE_DEVICES to name each GPU once. Found: {value!r} names one twice, so CUDA shows "
            "none. What to do: remove the repetition.",
        )
        return ()
    return _one_instance(chosen)


def _ends_list(entry: str) -> bool:
    """Whether the entry says "no more GPUs"."""
    return entry in ("", "NoDevFiles") or (entry.startswith("-") and entry[1:].isdecimal())


def _is_index(entry: str) -> bool:
    return entry.isascii() and entry.isdecimal()


def _indices_known(devices: Sequence[Device], environ: Mapping[str, str]) -> bool:
    """Whether CUDA's indices follow the PCI bus ids. By default CUDA sorts by speed, by an undocumented rule."""
    return environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({device.name for device in devices}) <= 1


def _named(entry: str, devices: Sequence[Device]) -> Device | None:
    """The one device that an index, a UUID or a prefix of a UUID names."""
    matches: Sequence[Device] = ()
    if _is_index(entry):
        matches = devices[int(entry) : int(entry) + 1] if len(entry) < 10 else ()
    elif entry.startswith("GPU-"):
        matches = [device for device in devices if device.uuid.startswith(entry)]
    elif entry.startswith("MIG-"):
        instances = [instance for device in devices for instance in device.instances or ()]
        matches = [instance for instance in instances if instance.uuid.startswith(entry)]
    matches = [device for device in matches if device.uuid == entry] or matches
    seen = _as_cuda_sees(matches[0]) if len(matches) == 1 else ()
    return seen[0] if seen else None


def _as_cuda_sees(device: Device) -> Sequence[Device]:
    """The device or, in MIG mode, its first instance, if any."""
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
        "Expected one visible MIG instance: a CUDA process uses one, and no other GPU beside it. Found: "
        f"{len(devices)} visible devices; {instances[0].uuid} is used. What to do: start one process per instance, "
        "each with that instance's UUID in CUDA_VISIBLE_DEVICES.",
    )
    return (instances[0],)
