"""The StableHLO modules that call cuDNN's attention, forward and backward."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

# Shape and element type of an operand or a result.
Type = tuple[tuple[int, ...], str]
# Contracted axis and batch axes of one side of a matrix product.
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
    """What cuDNN has to know of an attention; all of it becomes part of the compiled program.

    Attributes:
        batch: Examples in a batch.
        query_length: Positions that attend.
        key_length: Positions attended to.
        heads: Heads, as many for keys and values as for queries.
        size: Size of a head.
        dtype: "bfloat16" or "float16".
        causal: Whether a position attends to itself and those before it alone.
        scale: Factor on query · key.
    """

    batch: int
    query_length: int
    key_length: int
    heads: int
    size: int
    dtype: str
    causal: bool
    scale: float

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
        """Types of what the forward module returns: the output and the softmax statistic."""
        return self.query, self.statistic

    @property
    def backward_results(self) -> tuple[Type, ...]:
        """Types of what the backward module returns: the gradients of query, key and value."""
        return self.query, self.key, self.key


def forward_module(spec: AttentionSpec) -> str:
    """The module of (query, key, value) → (output, softmax statistic)."""
    operands = (spec.query, spec.key, spec.key)
    return _module("fwd", "__cudnn$fmhaSoftmax", operands, spec.forward_results, _config(spec, _FORWARD_PRODUCTS))


def backward_module(spec: AttentionSpec) -> str:
    """The module of (query, key, value, statistic, output's gradient, output) → gradients of query, key and value.

    The order of the operands is the one in which JAX gives them to the same call
    (jax/_src/cudnn/fused_attention_stablehlo.py).
    """
    operands = (spec.query, spec.key, spec.key, spec.statistic, spec.query, spec.query)
    return _module(
        "bwd", "__cudnn$fmhaSoftmaxBackward", operands, spec.backward_results, _config(spec, _BACKWARD_PRODUCTS)
    )


def _module(name: str, target: str, operands: tuple[Type, ...], results: tuple[Type, ...], config: str) -> str:
    """One custom call, whose results are turned to (batch, length, heads, size)."""
    names = [f"%arg{number}" for number in range(len(operands))]
    arguments = ", ".join(f"{name}: {_text(operand)}" for name, operand in zip(names, operands, strict=True))
    # The last result is cuDNN's workspace: XLA sets its size once it has chosen an algorithm.
    called = [*map(_heads_first, results), ((0,), "ui8")]
    attributes = (
        f'api_version = 2 : i32, backend_config = "{config}", operand_layouts = [{_layouts(operands)}], '
        f"result_layouts = [{_layouts(called, turned=True)}]"
    )
    lines = [
        f"%0:{len(called)} = stablehlo.custom_call @{target}({', '.join(names)}) {{{attributes}}} : "
        f"({_texts(operands)}) -> ({_texts(called)})"
    ]
    returned = []
    for number, (result, raw) in enumerate(zip(results, called, strict=False)):
        returned.append(f"%0#{number}")
        if raw != result:
            returned[-1] = f"%t{number}"
            turn = f"stablehlo.transpose %0#{number}, dims = [0, 2, 1, 3]"
            lines.append(f"%t{number} = {turn} : ({_text(raw)}) -> {_text(result)}")
    lines.append(f"return {', '.join(returned)} : {_texts(results)}")
    body = "\n    ".join(lines)
    return (
        f"module @cudnn_fmha_{name} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32}} {{\n"
        f"  func.func public @main({arguments}) -> ({_texts(results)}) {{\n    {body}\n  }}\n}}\n"
    )


def _heads_first(result: Type) -> Type:
    """The form in which cuDNN's results are declared: (batch, heads, length, size), or as it is with three axes."""
    shape, dtype = result
    return ((shape[0], shape[2], shape[1], shape[3]), dtype) if len(shape) == 4 else result


def _text(tensor: Type) -> str:
    shape, dtype = tensor
    return f"tensor<{'x'.join(map(str, shape))}x{_ELEMENTS.get(dtype, dtype)}>"


def _texts(tensors: Iterable[Type]) -> str:
    return ", ".join(map(_text, tensors))


def _layouts(tensors: Iterable[Type], *, turned: bool = False) -> str:
    """Axes from the fastest to the slowest; turned: heads first in the shape, and after the length in memory."""
    texts = []
    for shape, _ in tensors:
        order = [3, 1, 2, 0] if turned and len(shape) == 4 else [*range(len(shape))][::-1]
        texts.append(f"dense<{order if len(order) > 1 else order[0]}> : tensor<{len(order)}xindex>")
    return ", ".join(texts)


def _config(spec: AttentionSpec, products: dict[str, tuple[Side, Side]]) -> str:
    """The call's configuration, a JSON form of XLA's CudnnfMHABackendConfig, as MLIR writes text."""
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
