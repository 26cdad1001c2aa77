"""How additions, concatenations and changes of shape pass channels on, as layers and as operations of `keras.ops`."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from tfopt.compress.pruning.rules import follow
from tfopt.compress.pruning.units import Call, Channels, Fixed, NotUnderstoodError, Numbers, Tensor
from tfopt.internals.layers import operations

_LAYERS = keras.layers
_OPERATIONS = operations(
    *("nn.Relu", "nn.Relu6", "nn.Sigmoid", "nn.Silu", "nn.Gelu", "nn.Elu", "nn.LeakyRelu", "nn.HardSigmoid"),
    *("nn.HardSilu", "nn.Softplus", "numpy.Tanh", "numpy.Square", "numpy.Absolute", "numpy.Negative"),
    *("numpy.Add", "numpy.Subtract", "numpy.Multiply", "numpy.Maximum", "numpy.Minimum"),
)


def _element_wise(operation: Any, call: Call) -> Channels | Fixed:
    _require_scalars(call)
    return _joined(call, call.inputs)


for _kind in (
    *(_LAYERS.Add, _LAYERS.Subtract, _LAYERS.Multiply, _LAYERS.Average, _LAYERS.Maximum, _LAYERS.Minimum),
    *_OPERATIONS,
):
    follow.register(_kind, _element_wise)


def _require_scalars(call: Call) -> None:
    """Operations take arrays too, which would have to be cut."""
    constants = [value for value in keras.tree.flatten(list(call.arguments.values())) if not isinstance(value, Tensor)]
    if any(np.ndim(value) for value in constants):
        raise NotUnderstoodError("joins them with an array of as many")


def _joined(call: Call, tensors: Sequence[Tensor]) -> Channels | Fixed:
    """Channels at the same place are cut together; those of size 1, which are broadcast, stay."""
    found = [tensor.channels for tensor in tensors if isinstance(tensor.channels, Channels)]
    if not found:
        return Fixed(call.name)
    if len({len(tensor.shape) for tensor in tensors}) > 1:
        raise NotUnderstoodError("joins tensors of different ranks")
    axis = found[0].axis
    width = max(tensor.shape[axis] or 0 for tensor in tensors)
    joined: Numbers | None = None
    for tensor in tensors:
        if tensor.shape[axis] == 1 < width:
            call.keep(tensor, "spreads it over all channels")
            continue
        units = call.along(tensor, axis)
        if joined is not None:
            call.units.tie(joined, units)
        joined = units
    return Channels(axis, joined)


@follow.register(_LAYERS.Concatenate)
def _concatenated(operation: Any, call: Call) -> Channels | Fixed:
    _require_scalars(call)
    found = [tensor.channels for tensor in call.inputs if isinstance(tensor.channels, Channels)]
    if not found:
        return Fixed(call.name)
    if operation.axis is None:
        raise NotUnderstoodError
    axis = operation.axis % len(call.inputs[0].shape)
    if found[0].axis != axis:
        return _joined(call, call.inputs)
    return Channels(axis, np.concatenate([call.along(tensor, axis) for tensor in call.inputs]))


for _kind in operations("numpy.Concatenate"):
    follow.register(_kind, _concatenated)


@follow.register(_LAYERS.Flatten)
def _flattened(layer: Any, call: Call) -> Channels | Fixed:
    units = _everywhere(call)
    if units is None:
        return Fixed(call.name)
    if layer.data_format == "channels_first" and units.ndim > 1:
        units = np.moveaxis(units, 0, -1)
    return Channels(1, units.ravel())


@follow.register(_LAYERS.Reshape)
def _reshaped(layer: Any, call: Call) -> Channels | Fixed:
    units = _everywhere(call)
    if units is None:
        call.passes_in_every_call(None)
        return Fixed(call.name)
    units = units.reshape(layer.target_shape)
    axis = next((axis for axis in reversed(range(units.ndim)) if _alike_but_along(units, axis)), units.ndim - 1)
    rows = np.moveaxis(units, axis, -1).reshape(-1, units.shape[axis])
    passed = rows[0]
    if not (rows == passed).all():  # of a Dense, say, whose outputs become positions with channels
        call.units.tie(rows, np.broadcast_to(passed, rows.shape))

    call.passes_in_every_call(passed)

    def config(kept: Any) -> dict[str, Any]:
        target = list(layer.target_shape)
        target[axis] = kept(passed) if target[axis] != -1 else -1
        return {"target_shape": tuple(target)}

    call.resize(config)
    return Channels(axis + 1, passed)


@follow.register(_LAYERS.Permute)
def _permuted(layer: Any, call: Call) -> Channels | Fixed:
    found = call.inputs[0].channels
    return found if isinstance(found, Fixed) else Channels(1 + layer.dims.index(found.axis), found.units)


@follow.register(_LAYERS.RepeatVector)
def _repeated(layer: Any, call: Call) -> Channels | Fixed:
    found = call.inputs[0].channels
    return found if isinstance(found, Fixed) else Channels(2, found.units)


@follow.register(_LAYERS.InputLayer)
def _entered(layer: Any, call: Call) -> Channels | Fixed:
    """The input of a nested model."""
    found = call.inputs[0].channels
    if isinstance(found, Fixed):
        call.passes_in_every_call(None)
        return found
    call.passes_in_every_call(found.units)

    def config(kept: Any) -> dict[str, Any]:
        shape = list(layer.batch_shape)
        shape[found.axis] = kept(found.units)
        return {"batch_shape": tuple(shape)}

    call.resize(config)
    return found


def _everywhere(call: Call) -> Numbers | None:
    """The unit of each number in an input, without its batch axis; None if nothing of it can be cut."""
    (tensor,) = call.inputs
    if isinstance(tensor.channels, Fixed):
        return None
    shape = [size for size in tensor.shape[1:] if size is not None]
    if len(shape) < len(tensor.shape) - 1:
        raise NotUnderstoodError("changes a shape that is not known in full")
    aligned = [1] * len(shape)
    aligned[tensor.channels.axis - 1] = -1
    return np.broadcast_to(tensor.channels.units.reshape(aligned), shape)


def _alike_but_along(units: Numbers, axis: int) -> bool:
    """Whether a unit's number depends on one axis alone."""
    rows = np.moveaxis(units, axis, -1).reshape(-1, units.shape[axis])
    return bool((rows == rows[0]).all())
