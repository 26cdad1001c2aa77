"""How each kind of layer makes, reads and passes on channels; a layer without a rule keeps all that reach it."""

from functools import singledispatch
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compress.pruning.units import Call, Channels, Fixed, NotUnderstoodError, Numbers, Tensor

_LAYERS = keras.layers
_OVER_ALL = {"softmax", "log_softmax", "sparsemax", "glu"}
_ALONE = {
    function
    for name, function in vars(keras.activations).items()
    if callable(function) and name not in (*_OVER_ALL, "get", "serialize", "deserialize")
} | {tf.nn.relu, tf.nn.relu6, tf.nn.leaky_relu, tf.nn.elu, tf.nn.selu, tf.nn.gelu, tf.nn.silu, tf.nn.softplus}
_ALONE |= {tf.nn.sigmoid, tf.nn.tanh}
_ALONE_LAYERS = (
    *(_LAYERS.ReLU, _LAYERS.LeakyReLU, _LAYERS.ELU, _LAYERS.Identity, _LAYERS.ActivityRegularization),
    *(_LAYERS.GaussianNoise, _LAYERS.GaussianDropout),
)


@singledispatch
def follow(operation: Any, call: Call) -> Channels | Fixed:
    """Notes what a layer or operation does with its channels, and returns those of its output.

    Raises:
        NotUnderstoodError: If that is not known; the message, if any, says what it does, without its subject.
    """
    raise NotUnderstoodError


def _registered(*names: str) -> Any:
    """Registers a rule for some of Keras' layers."""

    def register(rule: Any) -> Any:
        for name in names:
            follow.register(getattr(_LAYERS, name), rule)
        return rule

    return register


def _dimensions(prefix: str, *, of: str = "123", suffix: str = "D") -> list[str]:
    return [f"{prefix}{number}{suffix}" for number in of]


# Layers that make channels.


@_registered("Dense")
def _dense(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    made = call.makes(layer.units)
    call.units.lie_on(layer.kernel, 0, call.along(tensor, -1), "reads")
    _made_on(layer, call, made, (layer.kernel, 1), (layer.bias, 0))
    call.resize(lambda kept: {"units": kept(made)})
    return Channels(len(tensor.shape) - 1, made)


@_registered(*_dimensions("Conv"))
def _convolution(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = channel_axis(layer, tensor)
    if layer.groups > 1:
        return _grouped(layer, call, axis)
    made = call.makes(layer.filters)
    call.units.lie_on(layer.kernel, -2, call.along(tensor, axis), "reads")
    _made_on(layer, call, made, (layer.kernel, -1), (layer.bias, 0))
    call.resize(lambda kept: {"filters": kept(made)})
    return Channels(axis, made)


def _grouped(layer: Any, call: Call, axis: int) -> Channels:
    """A group is cut with all its channels, those it reads and those it makes."""
    (tensor,) = call.inputs
    read = call.along(tensor, axis)
    by_group = read.reshape(layer.groups, -1)
    call.units.tie(by_group, np.repeat(by_group[:, :1], by_group.shape[1], axis=1))
    passed = np.repeat(by_group[:, 0], layer.filters // layer.groups)
    _carried_on(layer, call, passed, (layer.kernel, -1), (layer.bias, 0))
    size = by_group.shape[1]
    call.resize(lambda kept: {"filters": kept(passed), "groups": kept(read) // size})
    return Channels(axis, passed)


@_registered(*_dimensions("Conv", suffix="DTranspose"))
def _transposed(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = channel_axis(layer, tensor)
    made = call.makes(layer.filters)
    call.units.lie_on(layer.kernel, -1, call.along(tensor, axis), "reads")
    _made_on(layer, call, made, (layer.kernel, -2), (layer.bias, 0))
    call.resize(lambda kept: {"filters": kept(made)})
    return Channels(axis, made)


@_registered(*_dimensions("SeparableConv", of="12"))
def _separable(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = channel_axis(layer, tensor)
    read = call.along(tensor, axis)
    made = call.makes(layer.filters)
    call.units.lie_on(layer.depthwise_kernel, -2, read, "carries")
    call.units.lie_on(layer.pointwise_kernel, -2, np.repeat(read, layer.depth_multiplier), "reads")
    _made_on(layer, call, made, (layer.pointwise_kernel, -1), (layer.bias, 0))
    call.resize(lambda kept: {"filters": kept(made)})
    return Channels(axis, made)


@_registered("EinsumDense")
def _einsum(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    inputs, kernel, output = layer.equation.replace("->", ",").split(",")
    read, made_letter = inputs[-1], output[-1]
    if read not in kernel or read in output or made_letter not in kernel or made_letter in inputs:
        raise NotUnderstoodError
    made = call.makes(layer.kernel.shape[kernel.index(made_letter)])
    call.units.lie_on(layer.kernel, kernel.index(read), call.along(tensor, -1), "reads")
    axes = [(layer.kernel, kernel.index(made_letter))]
    if layer.bias is not None and made_letter in layer.bias_axes:
        axes.append((layer.bias, -1))
    _made_on(layer, call, made, *axes)
    call.resize(lambda kept: {"output_shape": (*layer.get_config()["output_shape"][:-1], kept(made))})
    return Channels(len(call.output_shape) - 1, made)


@_registered("Embedding")
def _embedding(layer: Any, call: Call) -> Channels:
    if call.arguments.get("reverse"):  # of a ReversibleEmbedding, which then reads them
        raise NotUnderstoodError
    made = call.makes(layer.output_dim)
    call.units.lie_on(layer.embeddings, 1, made, "makes")
    call.resize(lambda kept: {"output_dim": kept(made)})
    return Channels(len(call.inputs[0].shape), made)


# Layers that work on each channel alone.


@_registered(*_dimensions("DepthwiseConv", of="12"))
def _depthwise(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = channel_axis(layer, tensor)
    read = call.along(tensor, axis)
    passed = np.repeat(read, layer.depth_multiplier)
    call.units.lie_on(layer.kernel, -2, read, "carries")
    _carried_on(layer, call, passed, (layer.bias, 0))
    return Channels(axis, passed)


@_registered("BatchNormalization")
def _batch_norm(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = layer.axis % len(tensor.shape)
    read = call.along(tensor, axis)
    weights = (layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance)
    _carried_on(layer, call, read, *((weight, 0) for weight in weights))
    return Channels(axis, read)


@_registered("PReLU")
def _prelu(layer: Any, call: Call) -> Channels:
    (tensor,) = call.inputs
    axis = len(tensor.shape) - 1 if isinstance(tensor.channels, Fixed) else tensor.channels.axis
    units = call.along(tensor, axis)
    if layer.alpha.shape[axis - 1] > 1:  # else an axis that shares its weights
        call.units.lie_on(layer.alpha, axis - 1, units, "carries")
    return Channels(axis, units)


@_registered("Activation")
def _activation(layer: Any, call: Call) -> Channels | Fixed:
    if not _acts_alone(layer.activation):
        raise NotUnderstoodError("computes its activation from all of them together")
    return call.inputs[0].channels


@_registered("Dropout", "AlphaDropout")
def _dropout(layer: Any, call: Call) -> Channels | Fixed:
    found = call.inputs[0].channels
    if layer.noise_shape and isinstance(found, Channels) and layer.noise_shape[found.axis] not in (None, 1):
        raise NotUnderstoodError("has a noise_shape for as many as there are")
    return found


@_registered("Rescaling")
def _rescaling(layer: Any, call: Call) -> Channels | Fixed:
    if np.ndim(layer.scale) or np.ndim(layer.offset):
        raise NotUnderstoodError("has a scale for each of them in its config")
    return call.inputs[0].channels


def _alone(layer: Any, call: Call) -> Channels | Fixed:
    return call.inputs[0].channels


for _kind in _ALONE_LAYERS:
    follow.register(_kind, _alone)


@_registered(
    *(name for kind in ("MaxPooling", "AveragePooling", "ZeroPadding", "Cropping") for name in _dimensions(kind)),
    *(name for kind in ("UpSampling", "SpatialDropout") for name in _dimensions(kind)),
)
def _spatial(layer: Any, call: Call) -> Channels | Fixed:
    (tensor,) = call.inputs
    if isinstance(tensor.channels, Fixed):
        return tensor.channels
    axis = channel_axis(layer, tensor)
    return Channels(axis, call.along(tensor, axis))


@_registered(*(name for kind in ("Max", "Average") for name in _dimensions(f"Global{kind}Pooling")))
def _global_pooling(layer: Any, call: Call) -> Channels | Fixed:
    (tensor,) = call.inputs
    if isinstance(tensor.channels, Fixed):
        return tensor.channels
    axis = channel_axis(layer, tensor)
    return Channels(axis if layer.keepdims else 1, call.along(tensor, axis))


@_registered("LayerNormalization", "RMSNormalization", "GroupNormalization", "UnitNormalization", "Softmax")
def _over_all(layer: Any, call: Call) -> Channels:
    raise NotUnderstoodError("normalizes over them, so that each depends on all")


def channel_axis(layer: Any, tensor: Tensor) -> int:
    """The axis that a convolution or pooling takes as channels."""
    return 1 if getattr(layer, "data_format", None) == "channels_first" else len(tensor.shape) - 1


def _acts_alone(activation: Any) -> bool:
    return activation is None or isinstance(activation, _ALONE_LAYERS) or activation in _ALONE


def _made_on(layer: Any, call: Call, units: Numbers, *axes: tuple[Any, int]) -> None:
    _lie(layer, call, units, axes, "makes")


def _carried_on(layer: Any, call: Call, units: Numbers, *axes: tuple[Any, int]) -> None:
    _lie(layer, call, units, axes, "carries")


def _lie(layer: Any, call: Call, units: Numbers, axes: Any, role: Any) -> None:
    for weight, axis in axes:
        if weight is not None:
            call.units.lie_on(weight, axis, units, role)
    if not _acts_alone(getattr(layer, "activation", None)):
        call.units.pin(units, f"{call.name} computes its activation from all of them together")
