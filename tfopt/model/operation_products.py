"""Multiply-adds of TensorFlow's operations: matrix products, convolutions, cuDNN's RNNs and attention."""

import math
from collections.abc import Callable, Sequence

import tensorflow as tf

# What may stand between the rounding to float8 and the product; the factor is the scale.
_MOVING = ("Identity", "IdentityN", "Mul", "Reshape", "Transpose")
# What TensorFlow adds to a convolution along one axis, which it computes along two.
_RESHAPING = ("ExpandDims", "Identity", "Reshape", "Squeeze")
_Count = Callable[[tf.Operation], int | None]


def multiply_adds(operation: tf.Operation) -> int | None:
    """Multiply-adds of an operation that `is_product`; None if a size is unknown."""
    found = _COUNTS[operation.type](operation)
    return found * 4 if found and product_dtype(operation).startswith("complex") else found


def product_dtype(operation: tf.Operation) -> str:
    """The dtype that an operation multiplies in; "float8" if its operands were rounded to it, as XLA recognises it."""
    if len(operation.inputs) == 2 and all(_was_float8(tensor) for tensor in operation.inputs):
        return "float8"
    attributes = operation.node_def.attr
    name = next((name for name in ("T", "Ta") if name in attributes), None)
    found: str = operation.inputs[0].dtype.name if name is None else tf.dtypes.as_dtype(attributes[name].type).name
    return found


def _was_float8(tensor: tf.Tensor) -> bool:
    while tensor.op.type in _MOVING:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor.op.type == "Cast" and tensor.op.inputs[0].dtype.name.startswith("float8")


def is_product(kind: str) -> bool:
    """Whether operations of a type are matrix products or convolutions that can be counted."""
    return kind in _COUNTS


def is_opaque(operation: tf.Operation) -> bool:
    """Whether an operation may hold products that cannot be counted: foreign code, decompositions, solvers."""
    kind = operation.type
    if kind in _XLA_WITHOUT_PRODUCTS:
        return False
    if kind == "SegmentSum":
        return _ends_sparse_product(operation)
    return kind in _OPAQUE or kind.startswith(_OPAQUE_PREFIXES) or not hasattr(tf.raw_ops, kind)


def _ends_sparse_product(operation: tf.Operation) -> bool:
    """Whether a sum is the last part of a product with a sparse matrix, as keras.ops.matmul computes it.

    It gathers a row of the dense matrix for each element that is not zero, and multiplies and sums them. How many those
    are only the data says.
    """
    weighted, segments = (tensor.op for tensor in operation.inputs)
    while segments.type in ("Cast", "Identity", "StridedSlice"):
        segments = segments.inputs[0].op
    return weighted.type == "Mul" and segments.type == "SparseFillEmptyRows"


def _size(tensor: tf.Tensor) -> int | None:
    size: int | None = tensor.shape.num_elements()
    return size


def _axis(tensor: tf.Tensor, axis: int) -> int | None:
    size: int | None = None if tensor.shape.rank is None else tensor.shape[axis]
    return size


def _times(*factors: int | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _matmul(operation: tf.Operation) -> int | None:
    transposed = ("transpose_a", "transpose_b") if operation.type == "MatMul" else ("adj_x", "adj_y")
    left, right = (bool(operation.get_attr(name)) for name in transposed)
    first = _axis(operation.inputs[0], -2 if left else -1)
    second = _axis(operation.inputs[1], -1 if right else -2)
    return _times(_size(operation.outputs[0]), first if first is not None else second)


def _sparse_matmul(operation: tf.Operation) -> int | None:
    # Each element that is not zero meets a row of the dense matrix.
    return _times(_axis(operation.inputs[1], 0), _axis(operation.outputs[0], 1))


def _einsum(operation: tf.Operation) -> int | None:
    operands, output = operation.get_attr("equation").decode().replace(" ", "").split("->")
    sizes: dict[str, int | None] = {}
    letters = operands.split(",")
    tensors = [*operation.inputs, operation.outputs[0]]
    for labels, tensor in zip([*letters, output], tensors, strict=True):
        before, _, after = labels.partition("...")
        if tensor.shape.rank is None:
            return None
        for place, label in [*enumerate(before), *((place - len(after), label) for place, label in enumerate(after))]:
            sizes[label] = sizes.get(label) or tensor.shape[place]
    summed = set.intersection(*map(set, letters)) - set(output) - {"."}
    if len(letters) < 2 or not summed:
        return 0  # a transposition, a sum or an element-wise product
    # Labels of one operand alone are summed before the product.
    return _times(_size(operation.outputs[0]), *(sizes[label] for label in summed))


def _convolution(positions: Callable[[tf.Operation], tf.Tensor], kernel: Callable[[tf.Operation], tf.Tensor]) -> _Count:
    """A multiply-add for each element of the forward pass's output and each weight of its output channel."""

    def count(operation: tf.Operation) -> int | None:
        weights, channels = kernel(operation), _axis(kernel(operation), -1)
        total = _times(_size(positions(operation)), _size(weights))
        return total // channels if total is not None and channels else None

    return count


def _depthwise(positions: Callable[[tf.Operation], tf.Tensor], kernel: Callable[[tf.Operation], tf.Tensor]) -> _Count:
    return lambda operation: _times(
        _size(positions(operation)), _axis(kernel(operation), 0), _axis(kernel(operation), 1)
    )


def _cudnn_rnn(backward: bool) -> _Count:
    gates = {b"lstm": 4, b"gru": 3, b"rnn_relu": 1, b"rnn_tanh": 1}

    def count(operation: tf.Operation) -> int | None:
        inputs, state = operation.inputs[0], operation.inputs[1]
        directions = 2 if operation.get_attr("direction") == b"bidirectional" else 1
        # Keras' LSTM asks for the batch first, in the state too.
        batch_first = operation.type.endswith("V3") and not operation.get_attr("time_major")
        layers, units = _axis(state, 1 if batch_first else 0), _axis(state, -1)
        if layers is None or units is None or operation.get_attr("num_proj"):
            return None
        fed = _axis(inputs, 2)
        widths = None if fed is None else directions * (fed + units)
        deeper = (layers - directions) * (directions + 1) * units
        steps = _times(_axis(inputs, 0), _axis(inputs, 1))
        kind = gates[operation.get_attr("rnn_mode")]
        return None if widths is None else _times(steps, kind, units, widths + deeper, 2 if backward else 1)

    return count


def _cudnn_attention(operation: tf.Operation) -> int | None:
    """Two products forward, four backward: what the backward pass computes again does not count."""
    module = operation.get_attr("module")
    if b"__cudnn$fmha" not in module:
        return None
    query, key = operation.inputs[0], operation.inputs[1]
    products = 4 if b"SoftmaxBackward" in module else 2
    return _times(products, _size(query), _axis(key, 1))


def end_of_dilation(operation: tf.Operation) -> tf.Operation | None:
    """The operation that puts together what TensorFlow has split for a dilated convolution; None for other products.

    It crops the positions that only round the parts up to one size, so that they do not count.
    """
    while followed := [one for one in operation.outputs[0].consumers() if one.type in (*_RESHAPING, "BatchToSpaceND")]:
        operation = followed[0]
        if operation.type == "BatchToSpaceND":
            return operation
    return None


def _output(operation: tf.Operation) -> tf.Tensor:
    return (end_of_dilation(operation) or operation).outputs[0]


def _input(place: int) -> Callable[[tf.Operation], tf.Tensor]:
    return lambda operation: operation.inputs[place]


def _gradient(operation: tf.Operation) -> tf.Tensor:
    """The gradient of a convolution's output, before it is split for a dilated one."""
    source = operation.inputs[2].op
    while source.type in _RESHAPING:
        source = source.inputs[0].op
    return source.inputs[0] if source.type == "SpaceToBatchND" else operation.inputs[2]


def _of(kinds: Sequence[str], count: _Count) -> dict[str, _Count]:
    return dict.fromkeys(kinds, count)


_COUNTS: dict[str, _Count] = {
    **_of(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **_of(("Einsum", "XlaEinsum"), _einsum),
    "SparseTensorDenseMatMul": _sparse_matmul,
    **_of(("Conv", "Conv2D", "Conv3D"), _convolution(_output, _input(1))),
    **_of(
        ("Conv2DBackpropInput", "Conv2DBackpropInputV2", "Conv3DBackpropInputV2"), _convolution(_gradient, _input(1))
    ),
    **_of(
        ("Conv2DBackpropFilter", "Conv2DBackpropFilterV2", "Conv3DBackpropFilterV2"), _convolution(_gradient, _output)
    ),
    "DepthwiseConv2dNative": _depthwise(_output, _input(1)),
    "DepthwiseConv2dNativeBackpropInput": _depthwise(_gradient, _input(1)),
    "DepthwiseConv2dNativeBackpropFilter": _depthwise(_gradient, _output),
    **_of(("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"), _cudnn_rnn(backward=False)),
    **_of(("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"), _cudnn_rnn(backward=True)),
    "XlaCallModule": _cudnn_attention,
}
# TensorFlow makes no raw_ops of these. The first is keras.ops.slice_update.
_XLA_WITHOUT_PRODUCTS = {
    *("XlaDynamicUpdateSlice", "XlaDynamicSlice", "XlaPad", "XlaGather", "XlaBroadcastHelper"),
    *("XlaSort", "XlaKeyValueSort", "XlaSharding"),
}
_OPAQUE_PREFIXES = (
    *("Quantized", "Uniform", "SparseMatrix", "Batch3D", "LSTMBlock", "BlockLSTM", "GRUBlock", "TPU", "XlaSparse"),
    *("BatchCholesky", "BatchMatrix", "BatchSelfAdjoint", "BatchSvd", "SelfAdjointEig", "MatrixDet", "LogMatrixDet"),
)
_OPAQUE = {
    *("PyFunc", "PyFuncStateless", "EagerPyFunc", "RemoteCall", "SymbolicGradient", "MapDefun", "BatchFunction"),
    *("For", "ReduceDataset"),
    *("XlaDot", "XlaDotV2", "XlaConv", "XlaConvV2", "XlaCustomCall", "XlaCustomCallV2", "XlaHostCompute", "XlaLaunch"),
    *("SparseMatMul", "SparseSparseMinimum", "CSRSparseMatrixToDense", "Conv3DBackpropInput", "Conv3DBackpropFilter"),
    *("Cholesky", "CholeskyGrad", "Lu", "Qr", "Svd", "Eig", "SelfAdjointEigV2", "MatrixInverse", "MatrixSolve"),
    *("MatrixSolveLs", "MatrixTriangularSolve", "MatrixSquareRoot", "MatrixLogarithm", "MatrixExponential"),
    *("BandedTriangularSolve", "TridiagonalMatMul", "TridiagonalSolve", "FusedResizeAndPadConv2D", "FusedPadConv2D"),
}
