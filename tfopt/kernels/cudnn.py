"""cuDNN's attention: what rules it out, and the operations, forward and backward.

The operations are StableHLO modules that XLA compiles.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from tfopt.errors import UnsupportedError

# cuDNN before 9.0 refused shorter sequences (cudnn-frontend, scaled_dot_product_flash_attention.h), which gain little.
SHORTEST = 64


def obstacles(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *, mask: Any, causal: bool) -> Iterator[str]:
    """Yields what rules out cuDNN for an attention while it is traced; nothing if cuDNN can compute it."""
    if not in_xla():
        yield "not compiled by XLA"
    elif compute_capabilities() and device_type() != "GPU":
        yield "not placed on a GPU"
    if tf.distribute.has_strategy():
        yield "a distribution strategy"
    if pack_tangents([query, key, value]).tangents:
        yield "a ForwardAccumulator, for which cuDNN has no derivative"
    yield from standing_obstacles(query.dtype.name, query.shape[-1], value.shape[-1])
    if mask is not None:
        yield "a mask"
    if len({query.dtype, key.dtype, value.dtype}) > 1:
        yield f"different data types ({query.dtype.name}, {key.dtype.name}, {value.dtype.name})"
    yield from _of_shapes(query.shape, key.shape, value.shape, causal)


def standing_obstacles(dtype: str, key_size: int | None, value_size: int | None) -> Iterator[str]:
    """Yields what rules out cuDNN for any batch: the machine, the data type, the size of a head."""
    capabilities = compute_capabilities()
    if not capabilities:
        yield "no GPU"
    if any(capability < (8, 0) for capability in capabilities):
        yield "a GPU older than Ampere"
    if is_op_determinism_enabled():
        yield "op determinism, which cuDNN's backward pass does not give"
    if dtype not in ("bfloat16", "float16"):
        yield f"{dtype}, where cuDNN takes bfloat16 or float16"
    # What cuDNN supports on every GPU since Ampere, forward and backward. JAX checks the same:
    # check_is_flash_attention in jax/_src/cudnn/fused_attention_stablehlo.py.
    if key_size != value_size:
        yield f"keys of size {key_size} with values of size {value_size}"
    elif key_size is not None and (not 0 < key_size <= 128 or key_size % 8):
        yield f"heads of size {key_size}, where cuDNN takes multiples of 8 up to 128"


def in_xla() -> bool:
    """Whether the code being traced becomes part of a function with `jit_compile=True`."""
    return not tf.executing_eagerly() and GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def device_type() -> str:
    """Where the code being traced will run: "GPU", "CPU", or "" if unknown.

    A function runs where it is called, which its graph does not record; an operation outside all graphs runs there too.
    """
    with tf.init_scope():
        return tf.DeviceSpec.from_string(tf.zeros(()).device).device_type or ""


def compute_capabilities() -> list[tuple[int, int]]:
    """Returns the compute capability of each GPU that TensorFlow sees."""
    details = map(tf.config.experimental.get_device_details, tf.config.list_physical_devices("GPU"))
    return [detail.get("compute_capability", (0, 0)) for detail in details]


def _of_shapes(query: tf.TensorShape, key: tf.TensorShape, value: tf.TensorShape, causal: bool) -> Iterator[str]:
    if query.rank != 4:
        yield f"{query.rank} axes, where cuDNN takes batch, sequence, heads and size"
        return
    if not all(shape.is_fully_defined() for shape in (query, key, value)):
        names = ("batch", "sequence", "heads", "size")
        unknown = [name for name, *sizes in zip(names, query, key, value, strict=True) if None in sizes]
        yield f"a {' and '.join(unknown)} of no fixed size"
        return
    if (query[0], *query[2:]) != (key[0], *key[2:]) or key[:3] != value[:3]:
        yield f"different shapes {query}, {key} and {value}"
    if not query[0] or not query[2]:
        yield f"an empty query {query}"
    if min(query[1], key[1]) < SHORTEST:
        yield f"a sequence of {min(query[1], key[1])}, below {SHORTEST}"
    # With different lengths, cuDNN's mask has not been shown to be aligned as Keras' is.
    if causal and query[1] != key[1]:
        yield f"a causal mask on {query[1]} queries and {key[1]} keys"


# Shape and element type of an operand or a result.
Type = tuple[tuple[int, ...], str]
# Contracted axis and batch axes of one operand of a matrix product.
Side = tuple[str, tuple[str, str]]

_ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
# Scores are (batch, heads, query length, key length), everything else is (batch, length, heads, size).
_OF_SCORES = ("0", "1")
_OF_HEADS = ("0", "2")
_FORWARD_PRODUCTS = {
    "bmm1": (("3", _OF_HEADS), ("3", _OF_HEADS)),  # query · key
    "bmm2": (("3", _OF_SCORES), ("1", _OF_HEADS)),  # scores · value
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": (("2", _OF_SCORES), ("1", _OF_HEADS)),  # gradient of the scores · query
    "bmm1_grad_gemm2": (("3", _OF_SCORES), ("1", _OF_HEADS)),  # gradient of the scores · key
    "bmm2_grad_gemm1": (("2", _OF_SCORES), ("1", _OF_HEADS)),  # scores · gradient of the output
    "bmm2_grad_gemm2": (("3", _OF_HEADS), ("3", _OF_HEADS)),  # gradient of the output · value
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """An attention's sizes and options, all of which become part of the compiled program."""

    batch: int
    query_length: int
    key_length: int
    heads: int  # the same for queries, keys and values
    size: int  # of a head
    dtype: str  # "bfloat16" or "float16"
    causal: bool  # a position attends only to itself and earlier ones
    scale: float  # factor on query · key

    @property
    def query(self) -> Type:
        """Type of the query, the output and their gradients: (batch, query length, heads, size)."""
        return (self.batch, self.query_length, self.heads, self.size), self.dtype

    @property
    def key(self) -> Type:
        """Type of the key, the value and their gradients: (batch, key length, heads, size)."""
        return (self.batch, self.key_length, self.heads, self.size), self.dtype

    @property
    def statistic(self) -> Type:
        """Type of log Σ exp(scores), kept for the backward pass: (batch, heads, query length)."""
        return (self.batch, self.heads, self.query_length), "float32"

    @property
    def forward_results(self) -> tuple[Type, ...]:
        """Types of the forward module's results: the output and the softmax statistic."""
        return self.query, self.statistic

    @property
    def backward_results(self) -> tuple[Type, ...]:
        """Types of the backward module's results: the gradients of query, key and value."""
        return self.query, self.key, self.key


def flash_attention(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, *, causal: bool, scale: float) -> tf.Tensor:
    """Computes attention without ever storing the scores, forward or backward; its gradient has no gradient itself.

    Call it only if `obstacles` yields nothing. Query, key, value and output are (batch, length, heads, size); `scale`
    is the factor on query · key.
    """
    batch, query_length, heads, size = query.shape
    spec = AttentionSpec(
        batch=batch,
        query_length=query_length,
        key_length=key.shape[1],
        heads=heads,
        size=size,
        dtype=query.dtype.name,
        causal=causal,
        scale=scale,
    )

    @tf.custom_gradient
    def forward(*operands: tf.Tensor) -> Any:
        output, statistic = call_module(forward_module(spec), operands, spec.forward_results)
        return output, lambda upstream: backward(*operands, statistic, upstream, output)

    @tf.custom_gradient
    def backward(*operands: tf.Tensor) -> Any:
        return call_module(backward_module(spec), operands, spec.backward_results), _no_second_gradient

    return forward(query, key, value)


def call_module(module: str, operands: tuple[tf.Tensor, ...], results: tuple[Type, ...]) -> tuple[tf.Tensor, ...]:
    """Runs a module on a GPU, as part of a program that XLA compiles."""
    called = xla.call_module(
        operands,
        version=9,
        module=module,
        Tout=[dtype for _, dtype in results],
        Sout=[shape for shape, _ in results],
        platforms=["CUDA"],
        # On another platform, XLA itself reports that it has no kernel for the call.
        disabled_checks=["platform"],
    )
    return tuple(called)


def _no_second_gradient(*upstreams: tf.Tensor) -> NoReturn:
    raise UnsupportedError(
        "Expected gradients of a loss. Found: a gradient of cuDNN attention's gradient, which cuDNN does not offer. "
        "Remove the kernel first: tfopt.kernels.undo(model); in your own layer, use keras.ops.dot_product_attention."
    )


def forward_module(spec: AttentionSpec) -> str:
    """Returns the module for (query, key, value) → (output, softmax statistic)."""
    operands = (spec.query, spec.key, spec.key)
    return _module("fwd", "__cudnn$fmhaSoftmax", operands, spec.forward_results, _config(spec, _FORWARD_PRODUCTS))


def backward_module(spec: AttentionSpec) -> str:
    """Returns the module for the gradients of query, key and value.

    Its operands are query, key, value, statistic, the output's gradient and the output, in JAX's order for the same
    call (jax/_src/cudnn/fused_attention_stablehlo.py).
    """
    operands = (spec.query, spec.key, spec.key, spec.statistic, spec.query, spec.query)
    return _module(
        "bwd", "__cudnn$fmhaSoftmaxBackward", operands, spec.backward_results, _config(spec, _BACKWARD_PRODUCTS)
    )


def _module(name: str, target: str, operands: tuple[Type, ...], results: tuple[Type, ...], config: str) -> str:
    """One custom call, with its results transposed to (batch, length, heads, size)."""
    names = [f"%arg{number}" for number in range(len(operands))]
    arguments = ", ".join(f"{name}: {_type(operand)}" for name, operand in zip(names, operands, strict=True))
    # The last result is cuDNN's workspace, which XLA sizes once it has chosen an algorithm.
    called = [*map(_heads_first, results), ((0,), "ui8")]
    attributes = (
        f'api_version = 2 : i32, backend_config = "{config}", operand_layouts = [{_layouts(operands)}], '
        f"result_layouts = [{_layouts(called, transposed=True)}]"
    )
    lines = [
        f"%0:{len(called)} = stablehlo.custom_call @{target}({', '.join(names)}) {{{attributes}}} : "
        f"({_types(operands)}) -> ({_types(called)})"
    ]
    returned = []
    for number, (result, raw) in enumerate(zip(results, called, strict=False)):
        returned.append(f"%0#{number}")
        if raw != result:
            returned[-1] = f"%t{number}"
            transpose = f"stablehlo.transpose %0#{number}, dims = [0, 2, 1, 3]"
            lines.append(f"%t{number} = {transpose} : ({_type(raw)}) -> {_type(result)}")
    lines.append(f"return {', '.join(returned)} : {_types(results)}")
    body = "\n    ".join(lines)
    return (
        f"module @cudnn_fmha_{name} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32}} {{\n"
        f"  func.func public @main({arguments}) -> ({_types(results)}) {{\n    {body}\n  }}\n}}\n"
    )


def _heads_first(result: Type) -> Type:
    """The shape declared for cuDNN's results: (batch, heads, length, size); unchanged with three axes."""
    shape, dtype = result
    return ((shape[0], shape[2], shape[1], shape[3]), dtype) if len(shape) == 4 else result


def _type(tensor: Type) -> str:
    shape, dtype = tensor
    return f"tensor<{'x'.join(map(str, shape))}x{_ELEMENTS.get(dtype, dtype)}>"


def _types(tensors: Iterable[Type]) -> str:
    return ", ".join(map(_type, tensors))


def _layouts(tensors: Iterable[Type], *, transposed: bool = False) -> str:
    """Axes from fastest to slowest; transposed: heads before the length in the shape, after it in memory."""
    layouts = []
    for shape, _ in tensors:
        order = [3, 1, 2, 0] if transposed and len(shape) == 4 else [*range(len(shape))][::-1]
        layouts.append(f"dense<{order if len(order) > 1 else order[0]}> : tensor<{len(order)}xindex>")
    return ", ".join(layouts)


def _config(spec: AttentionSpec, products: dict[str, tuple[Side, Side]]) -> str:
    """The call's configuration: XLA's CudnnfMHABackendConfig as JSON, escaped as in MLIR."""
    element = {"bfloat16": "BF16", "float16": "F16"}[spec.dtype]
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": spec.scale,
        "intermediate_tensor_shape": _scores_shape(spec, element),
        "is_flash_attention": True,
        "mask_type": "CAUSAL" if spec.causal else "NO_MASK",
        **{f"{name}_dot_dimension_numbers": _dimensions(*sides) for name, sides in products.items()},
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": 0,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}).replace('"', "\\22")


def _scores_shape(spec: AttentionSpec, element: str) -> dict[str, object]:
    return {
        "element_type": element,
        "dimensions": [str(size) for size in (spec.batch, spec.heads, spec.query_length, spec.key_length)],
        "tuple_shapes": [],
        "layout": {
            "dim_level_types": [],
            "dim_unique": [],
            "dim_ordered": [],
            "minor_to_major": ["3", "2", "1", "0"],
            "tiles": [],
            "element_size_in_bits": "0",
            "memory_space": "0",
            "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
            "dynamic_shape_metadata_prefix_bytes": "0",
        },
        "is_dynamic_dimension": [False] * 4,
    }


def _dimensions(left: Side, right: Side) -> dict[str, list[str]]:
    return {
        "lhs_contracting_dimensions": [left[0]],
        "rhs_contracting_dimensions": [right[0]],
        "lhs_batch_dimensions": [*left[1]],
        "rhs_batch_dimensions": [*right[1]],
    }
