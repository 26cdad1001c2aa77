"""Where batches are copied ahead of use, whether all examples are kept there, and what XLA compiles there."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfopt.errors import DeviceMemoryError, UnsupportedError
from tfopt.hardware import host
from tfopt.hardware.gpu_memory import in_use_bytes, limit_bytes
from tfopt.pipelines.device.copying import BATCHES_AHEAD, is_int32
from tfopt.pipelines.inspection.facts import Facts
from tfopt.pipelines.shared.elements import apply_stage, element_of, is_static
from tfopt.pipelines.shared.layer_function import LayerFunction
from tfopt.pipelines.shared.options import PipelineOptions, StageFunction
from tfopt.text import readable_bytes

_MIB = 2**20
# The divisor of the free device memory that examples may take. The model, whose needs are unknown yet, takes the rest;
# a user who asks for the device has considered that, cache="auto" has not.
_ASKED_SHARE = 2
_AUTO_SHARE = 4
_SHARES = {_ASKED_SHARE: "half", _AUTO_SHARE: "a quarter"}
_HOST = "/device:CPU:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDevice:
    """A data set that is kept on the device."""

    device: str
    bytes: float  # what it takes there
    reason: str
    only: bool  # whether it was asked for, so that batches come from there alone; otherwise both ways work
    obstacles: tuple[str | None, ...] = ()  # for each function of `augment`: why it runs without XLA, or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where batches are copied to, and whether all examples are kept there."""

    device: str | None
    reason: str
    held: OnDevice | str | None  # where all examples are kept, for overlap; why they are not; None if not considered


def choose_placement(options: PipelineOptions, facts: Facts) -> Placement:
    """Returns where batches go.

    Raises:
        ValueError: If there is no such device, or cache="device" does not go with the data or another option.
        UnsupportedError: If cache="device" is used under a distribution strategy.
        DeviceMemoryError: If the data do not fit.
    """
    if options.on_device:
        asked = _place_on_device(options, facts)
        reason = "the examples are kept there, and batches are made there"
        return Placement(device=asked.device, reason=reason, held=asked)
    device, reason = choose_device(options.device, facts.traced.augmented.element_spec)
    held = None
    if device is not None and options.cache == "auto" and is_gpu(device):
        held = _place_beside(options, facts, device)
    return Placement(device=device, reason=reason, held=held)


def choose_device(asked: str | None, spec: Any) -> tuple[str | None, str]:
    """Returns the device to copy elements of this spec to, None for none, and why; `asked` is the option `device`.

    Raises:
        ValueError: If there is no such device; TensorFlow would silently leave the batches on the host.
    """
    if asked is None:
        return None, "device=None: Keras copies each batch when it is asked for"
    gpus = [device.name for device in tf.config.list_logical_devices("GPU")]
    if asked == "auto":
        if not gpus:
            return None, "no GPU"
        if tf.distribute.has_strategy():
            return None, "the distribution strategy copies the batches to its devices"
        if not all(isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in tf.nest.flatten(spec)):
            return None, "texts, ragged and sparse tensors stay on the host"
        reason = f"{BATCHES_AHEAD} batches are copied before they are asked for"
        if any(map(is_int32, tf.nest.flatten(spec))):
            reason += "; without XLA their int32 parts come back on each step, unless tfopt.fit.overlap runs it"
        return gpus[0], reason
    devices = [device.name for device in tf.config.list_logical_devices()]
    if _canonical(asked) not in [_canonical(device) for device in devices]:
        raise ValueError(
            f"Expected a device that TensorFlow sees for `device`: {', '.join(devices)}. Received: {asked!r}. Pass one "
            'of them, "auto", or None for none.'
        )
    return asked, f"asked for; {BATCHES_AHEAD} batches are copied before they are asked for"


def is_gpu(device: str | None) -> bool:
    """Whether a device's name is that of a GPU."""
    return "GPU" in (device or "").upper()


def _place_on_device(options: PipelineOptions, facts: Facts) -> OnDevice:
    """Returns where cache="device" puts the data."""
    if tf.distribute.has_strategy():
        raise UnsupportedError(
            "cache='device' expects one device. Found a tf.distribute strategy, for which dividing the examples among "
            "its devices is not implemented. Build the pipeline with cache='memory'."
        )
    for expected, found, remedy in _conflicts(options, facts):
        raise ValueError(f"cache='device' expects {expected}. Found {found}. {remedy}")
    device = choose_device(options.device, facts.traced.examples.element_spec)[0] or _HOST
    size = _size(facts)
    fits, reason = _room(device, size, _ASKED_SHARE)
    if not fits:
        raise DeviceMemoryError(
            f"Expected data that fit on the device, for cache='device'. {reason}. Make the examples smaller in "
            "`transform` (images as uint8), or pass cache='auto'."
        )
    obstacles = find_obstacles(options, _full_batch(options, facts))
    return OnDevice(device=device, bytes=size, reason=f"asked for; {reason}", only=True, obstacles=obstacles)


def _place_beside(options: PipelineOptions, facts: Facts, device: str) -> OnDevice | str:
    """Returns where cache="auto" also puts the data for `tfopt.fit.overlap`, or why nowhere.

    The pipeline then works both ways, and a `fit` without `overlap` takes the other one. So nothing may depend on which
    one is taken: no function of `augment`, whose draws differ under XLA, and no order under a seed. `device` is the GPU
    to which the pipeline copies its batches.
    """
    if options.augmentations:
        return "`augment` draws otherwise on the device: cache='device' asks for it"
    if options.seed is not None and options.shuffle:
        return "under a seed the order must not depend on free memory: cache='device' asks for it"
    if options.balance is not None:
        return "`balance` decides the order on the host"
    if facts.doubt:
        return facts.doubt
    for expected, found, _ in _conflicts(options, facts):
        return f"expects {expected}; found {found}"
    size = _size(facts)
    fits, reason = _room(device, size, _AUTO_SHARE)
    return OnDevice(device=device, bytes=size, reason=reason, only=False) if fits else reason


def find_obstacles(options: PipelineOptions, spec: Any) -> tuple[str | None, ...]:
    """Returns, for each function of `augment`, why XLA cannot compile it; None if it can.

    A layer whose `supports_jit` is False is believed. Everything else is lowered, which takes a fraction of a second:
    some layers that claim to compile do not, such as RandAugment and MixUp.

    `spec` is the element spec of a full batch before `augment`.

    Example:
        >>> from tfopt.pipelines import per_batch
        >>> options = PipelineOptions(augment=[per_batch(tf.abs), per_batch(tf.io.encode_base64)])
        >>> find_obstacles(options, tf.TensorSpec((4, 2)))[0] is None
        True
    """
    found = []
    for function in options.augmentations:
        obstacle, spec = _obstacle(function, spec)
        found.append(obstacle)
    return tuple(found)


def free_bytes(device: str) -> float | None:
    """Returns what is free on a device, None if unknown; on a GPU, what TensorFlow may take and does not use."""
    if not is_gpu(device):
        free_mib = host().memory_available_mib
        return None if free_mib is None else free_mib * _MIB
    limit = limit_bytes(device)
    return None if limit is None else limit - in_use_bytes(device)


def _conflicts(options: PipelineOptions, facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Yields what is expected, what was found, and what to do."""
    if facts.infinite or facts.count is None:
        found = "an endless source" if facts.infinite else "a source of unknown length"
        yield "a known number of examples", found, "Give the Source its count=, or pass cache='auto'."
    if options.crop is not None and options.crop.random:
        remedy = "Pass CentralCrop, and keras.layers.RandomCrop as `augment`; or cache='auto'."
        yield "the same examples in each epoch", "a RandomCrop", remedy
    if options.cache_after == "decode":
        remedy = "Leave cache_after out, and do the rest on the device: in `augment`, or in the model."
        yield "`transform` to be done once", "cache_after='decode'", remedy
    if options.pad is not None and not is_static(facts.traced.examples.element_spec):
        yield "examples of one shape", f"pad={options.pad!r}", "Pass cache='auto'."
    if options.device is None:
        yield "a device", "device=None", "Leave `device` out, or pass its name."
    for leaf in tf.nest.flatten(facts.traced.examples.element_spec):
        if not isinstance(leaf, tf.TensorSpec) or leaf.dtype in (tf.string, tf.variant, tf.resource):
            remedy = "Make them dense numbers in `transform`, or pass cache='auto'."
            yield "dense tensors of numbers", f"examples with {leaf}", remedy
    for function in options.augmentations:
        if not function.by_batch:
            remedy = "Rewrite it for batches and mark it with per_batch, or pass a Keras layer, or cache='auto'."
            yield "an `augment` of whole batches", f"{function.name}, which takes single examples", remedy


def _size(facts: Facts) -> float:
    return (facts.count or 0) * facts.sample.example_bytes


def _room(device: str, size: float, share: int) -> tuple[bool, str]:
    """Returns whether data fit in a share of what is free on a device, and why."""
    free, needed = free_bytes(device), readable_bytes(size)
    if free is None:
        return False, f"{needed} are needed, and what is free on {device} is unknown"
    part = f"{_SHARES[share]} of the {readable_bytes(free)} free on {device}"
    if size > free / share:
        return False, f"{needed} are needed, and exceed {part}"
    return True, f"{needed}, within {part}"


def _canonical(device: str) -> str:
    """Returns one text for all ways to name a device; "" for an invalid name."""
    try:
        parsed = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    except ValueError:
        return ""
    return f"{(parsed.device_type or '').upper()}:{parsed.device_index or 0}"


def _full_batch(options: PipelineOptions, facts: Facts) -> Any:
    """The element spec of a full batch of examples, with sampled shapes where TensorFlow knows none."""
    spec = facts.traced.examples.element_spec
    leaves = tf.nest.flatten(spec)
    shapes = [leaf.shape for leaf in leaves] if facts.check is None else facts.check.shapes
    specs = [
        tf.TensorSpec((options.batch_size, *(shape or ())), leaf.dtype)
        for leaf, shape in zip(leaves, shapes, strict=True)
    ]
    return tf.nest.pack_sequence_as(spec, specs)


def _obstacle(function: StageFunction, spec: Any) -> tuple[str | None, Any]:
    """Returns the obstacle, and the element spec after the function."""

    def called(*parts: Any, seed: Any) -> Any:
        keywords = {"seed": seed} if function.seeded else {}
        return apply_stage("augment", function.call, element_of(parts, spec), **keywords)

    arguments = spec if type(spec) is tuple else (spec,)
    seed = tf.TensorSpec((2,), tf.int32)
    after = tf.function(called).get_concrete_function(*arguments, seed=seed).structured_outputs
    after = tf.nest.map_structure(lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype), after)
    layers = function.call.layer._flatten_layers() if isinstance(function.call, LayerFunction) else ()
    if not all(getattr(layer, "supports_jit", True) for layer in layers):
        return "supports_jit is False", after
    try:
        tf.function(called, jit_compile=True).experimental_get_compiler_ir(*arguments, seed=seed)(stage="hlo")
    except (ValueError, tf.errors.OpError) as error:
        operation = re.search(r"No registered '(\w+)'", str(error))
        return f"XLA has no {operation[1]}" if operation else "XLA cannot compile it", after
    return None, after
