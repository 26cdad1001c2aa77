"""Decides whether a data set lies on the device: what it needs, what is free there, and what stands against it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.hardware import host
from tfopt.hardware.gpu_memory import in_use_bytes, limit_bytes
from tfopt.pipelines.caching import MIB, Facts, readable
from tfopt.pipelines.device import choose_device
from tfopt.pipelines.shared.elements import leaves
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, function_name
from tfopt.warn import warn_once

# One part in so many of what is free on the device. The model, whose needs are not known yet, takes the rest; who asks
# for the device has thought of that, cache="auto" has not.
ASKED_SHARE = 2
AUTO_SHARE = 4
_HOST = "/device:CPU:0"
_SHARES = {ASKED_SHARE: "half", AUTO_SHARE: "a quarter"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A data set that lies on the device.

    Args:
        device: The device.
        bytes: What it takes there.
        reason: Why it lies there.
        only: Whether it was asked for: batches come from there alone. Else the pipeline also works without.
        obstacles: For each function of `augment`, why it runs without XLA; None where XLA compiles it.
    """

    device: str
    bytes: float
    reason: str
    only: bool
    obstacles: tuple[str | None, ...] = ()


def on_asked_device(options: PipelineOptions, facts: Facts, spec: Any) -> OnDevice:
    """Returns where cache="device" puts the data.

    Args:
        options: The pipeline's options.
        facts: What is known of the data.
        spec: The element spec of the examples behind `transform`.

    Raises:
        ValueError: An option, the source or the examples do not go with it.
        UnsupportedError: A distribution strategy is active.
        PipelineError: There is too little memory.
    """
    if tf.distribute.has_strategy():
        raise UnsupportedError(
            "cache='device' expects one device. Found a tf.distribute strategy: which of its devices would hold which "
            "examples is not worked out. Build the pipeline with cache='memory'."
        )
    for expected, found, remedy in _conflicts(options, facts, spec):
        raise ValueError(f"cache='device' expects {expected}. Found {found}. {remedy}")
    device = choose_device(options.device, spec)[0] or _HOST
    size = _size(facts)
    reason = _shortage(device, size, ASKED_SHARE)
    if reason:
        raise PipelineError(
            f"Expected data that fit on the device, for cache='device'. {reason}. Make the examples smaller in "
            "`transform` (images as uint8), or pass cache='auto'."
        )
    # Only a warning: the memory of some containers and virtual machines grows on demand, and does not say so.
    if reason := _host_shortage(size):
        warn_once(
            "host_memory_for_device_cache", f"cache='device': {reason}. If loading fails, give the job more memory."
        )
    return OnDevice(device=device, bytes=size, reason=f"asked for; {_fits(device, size, ASKED_SHARE)}", only=True)


def beside_auto(options: PipelineOptions, facts: Facts, spec: Any, device: str | None) -> OnDevice | str:
    """Returns where cache="auto" also puts the data for `tfopt.fit.overlap`, or why nowhere.

    The pipeline then has both ways, and a `fit` without `overlap` takes the other one. So nothing may depend on which
    one is taken: no function of `augment`, whose draws XLA makes in another way, and no order under a seed.

    Args:
        options: The pipeline's options, of which `cache` is "auto".
        facts: What is known of the data.
        spec: The element spec of the examples behind `transform`.
        device: Where the pipeline copies its batches, a GPU.
    """
    if options.augmentations:
        return "`augment` draws otherwise on the device: cache='device' asks for it"
    if options.seed is not None and options.shuffle:
        return "under a seed the order must not depend on free memory: cache='device' asks for it"
    if facts.doubt:
        return facts.doubt
    for expected, found, _ in _conflicts(options, facts, spec):
        return f"expects {expected}; found {found}"
    size = _size(facts)
    reason = _shortage(str(device), size, AUTO_SHARE) or _host_shortage(size)
    return reason or OnDevice(device=str(device), bytes=size, reason=_fits(str(device), size, AUTO_SHARE), only=False)


def is_gpu(device: str | None) -> bool:
    """Whether a device's name is that of a GPU."""
    return "GPU" in (device or "").upper()


def free_bytes(device: str) -> float | None:
    """Returns what is free on a device, None where unknown: of a GPU what TensorFlow may take and does not use."""
    if not is_gpu(device):
        free_mib = host().memory_available_mib
        return None if free_mib is None else free_mib * MIB
    limit = limit_bytes(device)
    return None if limit is None else limit - in_use_bytes(device)


def _conflicts(options: PipelineOptions, facts: Facts, spec: Any) -> Iterator[tuple[str, str, str]]:
    """Yields what is expected, what was found, and what to do."""
    if facts.infinite or facts.count is None:
        found = "an endless source" if facts.infinite else "a source of unknown length"
        yield "a known number of examples", found, "Give the Source its count=, or pass cache='auto'."
    if options.crop is not None and options.crop.random:
        remedy = "Pass CentralCrop, and keras.layers.RandomCrop as `augment`; or cache='auto'."
        yield "the same examples in each epoch", "a RandomCrop", remedy
    if options.cache_after == "decode":
        remedy = "Leave cache_after out, and do on the device what is left: in `augment`, or in the model."
        yield "`transform` to be done once", "cache_after='decode'", remedy
    if options.device is None:
        yield "a device", "device=None", "Leave `device` out, or pass its name."
    for leaf in leaves(spec):
        if not isinstance(leaf, tf.TensorSpec) or leaf.dtype in (tf.string, tf.variant, tf.resource):
            remedy = "Make them dense numbers in `transform`, or pass cache='auto'."
            yield "dense tensors of numbers", f"examples with {leaf}", remedy
    for function in options.augmentations:
        if not isinstance(function, PerBatch):
            remedy = "Rewrite it for batches and mark it with per_batch, or pass a Keras layer, or cache='auto'."
            yield "an `augment` of whole batches", f"{function_name(function)}, which takes single examples", remedy


def _size(facts: Facts) -> float:
    return (facts.count or 0) * facts.sample.example_bytes


def _fits(device: str, size: float, share: int) -> str:
    return f"{readable(size)}, within {_SHARES[share]} of the {readable(free_bytes(device) or 0)} free on {device}"


def _shortage(device: str, size: float, share: int) -> str:
    """Why the data do not fit on the device, "" where they do."""
    free = free_bytes(device)
    if free is None:
        return f"{readable(size)} are needed, and what is free on {device} is unknown"
    if size > free / share:
        return f"{readable(size)} are needed, and exceed {_SHARES[share]} of the {readable(free)} free on {device}"
    return ""


def _host_shortage(size: float) -> str:
    """Why the data may not fit in host memory while they are loaded, "" where they do."""
    # They are gathered in host memory first: on the device, joining them would take twice the room.
    free_mib = host().memory_available_mib
    if free_mib is not None and size <= free_mib * MIB:
        return ""
    found = "an unknown amount is" if free_mib is None else f"{free_mib:,.0f} MiB are"
    return f"{readable(size)} of host memory are needed while the data are loaded, and {found} free"
