"""Gradients of variables that are sums in 16 bits, beside the same sum in float32 of what arrives there."""

import math
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

_16_BIT = (tf.float16, tf.bfloat16)
# What the gradient of a bias or a scale ends in. On a CPU some of them add one element after the other in their own
# dtype: 4,096 ones in bfloat16 give 256. Products and convolutions do not.
_SUMS = {"BiasAddGrad", "Sum", "Mean", "UnsortedSegmentSum", "DepthwiseConv2dNativeBackpropFilter"}
_PASSING = {"Cast", "Identity", "Reshape", "RealDiv"}
_ALIKE = 0.05
# For a size that the graph does not know, up to as many numbers.
_ROWS = 4096
_MOST = 2**28


def sums_of(gradient: tf.Tensor) -> list[tf.Operation]:
    """The sums in 16 bits that a gradient is made of."""
    op = gradient.op
    if op.type in _SUMS and gradient.dtype in _16_BIT:
        return [op]
    parts = op.inputs[:1] if op.type in _PASSING else op.inputs if op.type in ("AddN", "AddV2") else ()
    return [one for part in parts for one in sums_of(part)]


def in_float32(op: tf.Operation) -> tf.Tensor:
    """The same sum of the same tensors, in float32."""
    return _made_like(op, [tf.cast(x, tf.float32) if x.dtype in _16_BIT else x for x in op.inputs], tf.float32)


def right_with_xla(op: tf.Operation) -> bool:
    """Whether XLA, on this device, sums ones as float32 does; False if it is not known."""
    known = [tf.get_static_value(x) if x.dtype not in _16_BIT else x.shape.rank for x in op.inputs]
    if any(x is None for x in known):
        return False
    unknown = [x.shape for x in op.inputs if x.dtype in _16_BIT and not x.shape.is_fully_defined()]
    if any(math.prod(size or _ROWS for size in shape) > _MOST for shape in unknown):
        return False
    data = [
        tf.ones([size or _ROWS for size in x.shape], x.dtype) if x.dtype in _16_BIT else value
        for x, value in zip(op.inputs, known, strict=True)
    ]
    summed = tf.function(lambda *data: _made_like(op, data, op.outputs[0].dtype), jit_compile=True, autograph=False)
    plain = tf.function(lambda *data: in_float32(_made_like(op, data, op.outputs[0].dtype).op), autograph=False)
    try:
        found, right = (tf.cast(one(*data), tf.float32).numpy() for one in (summed, plain))
    except tf.errors.OpError:
        return False
    return bool(np.linalg.norm(found - right) <= _ALIKE * np.linalg.norm(right))


def _made_like(op: tf.Operation, inputs: Iterable[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
    attributes = {name: value for name, value in op.node_def.attr.items() if not name.startswith("_")}
    attributes["T"] = AttrValue(type=dtype.as_datatype_enum)
    graph = tf.compat.v1.get_default_graph()
    return graph.create_op(op.type, [*inputs], [dtype], attrs=attributes).outputs[0]
