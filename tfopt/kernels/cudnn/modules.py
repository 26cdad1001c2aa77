"""The calls of cuDNN's attention, forward and backward, as StableHLO modules that XLA compiles."""

import json
from collections.abc import Iterable
from dataclasses import dataclass

# Shape and element type of an operand or a result.
Type = tuple[tuple[int, ...], str]
# Contracted axis and batch axes of one operand of a matrix product.
Side = tuple[str, tuple[str, str]]

_ELEMENTS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32"}
# The layout of results with heads: before the length in the shape, after it in memory.
_HEADS_FIRST = "dense<[3, 1, 2, 0]> : tensor<4xindex>"
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
    heads: int  # of the query
    key_heads: int  # of key and value; each serves a group of the query's heads, in their order
    size: int  # of a head
    dtype: str  # "bfloat16" or "float16"
    causal: bool  # a position attends only to itself and earlier ones
    window: int = 0  # and of these only to so many, itself included; 0: to all
    bias: tuple[int, int] | None = (
        None  # batch and heads of what is added to the scores; 1 where it is the same for all
    )
    lengths: bool = False  # whether each example's number of queries and of keys is an operand
    scale: float  # factor on query · key

    @property
    def query(self) -> Type:
        """Type of the query, the output and their gradients: (batch, query length, heads, size)."""
        return (self.batch, self.query_length, self.heads, self.size), self.dtype

    @property
    def key(self) -> Type:
        """Type of the key, the value and their gradients: (batch, key length, key heads, size)."""
        return (self.batch, self.key_length, self.key_heads, self.size), self.dtype

    @property
    def statistic(self) -> Type:
        """Type of log Σ exp(scores), kept for the backward pass: (batch, heads, query length)."""
        return (self.batch, self.heads, self.query_length), "float32"

    @property
    def bias_types(self) -> tuple[Type, ...]:
        """Type of the bias and its gradient, if there is one: (batch, heads, query length, key length)."""
        return () if self.bias is None else (((*self.bias, self.query_length, self.key_length), self.dtype),)

    @property
    def length_types(self) -> tuple[Type, ...]:
        """Types of the numbers of queries and of keys, if they are operands: (batch)."""
        return (((self.batch,), "int32"),) * 2 if self.lengths else ()

    @property
    def forward_results(self) -> tuple[Type, ...]:
        """Types of the forward module's results: the output and the softmax statistic."""
        return self.query, self.statistic

    @property
    def backward_results(self) -> tuple[Type, ...]:
        """Types of the backward module's results: the gradients of query, key, value and bias."""
        return self.query, self.key, self.key, *self.bias_types

    @property
    def target(self) -> str:
        """The name of the forward call."""
        return "__cudnn$fmhaSoftmax" if self.bias is None else "__cudnn$fmhaScaleBiasSoftmax"


def forward_module(spec: AttentionSpec) -> str:
    """Returns the module for (query, key, value[, bias][, lengths of query and key]) → (output, softmax statistic)."""
    operands = (spec.query, spec.key, spec.key, *spec.bias_types, *spec.length_types)
    config = _config(spec, _FORWARD_PRODUCTS)
    return _module("fwd", spec.target, operands, spec.forward_results, config, of_heads=1)


def backward_module(spec: AttentionSpec) -> str:
    """Returns the module for the gradients of query, key, value and bias.

    Its operands are query, key, value, statistic, the output's gradient, bias, the output and the lengths, in JAX's
    order for the same call (jax/_src/cudnn/fused_attention_stablehlo.py).
    """
    given = (spec.query, *spec.bias_types, spec.query, *spec.length_types)
    operands = (spec.query, spec.key, spec.key, spec.statistic, *given)
    config = _config(spec, _BACKWARD_PRODUCTS)
    return _module("bwd", f"{spec.target}Backward", operands, spec.backward_results, config, of_heads=3)


def _module(
    name: str, target: str, operands: tuple[Type, ...], results: tuple[Type, ...], config: str, *, of_heads: int
) -> str:
    """One custom call; its first results, those with heads, are transposed to (batch, length, heads, size)."""
    names = [f"%arg{number}" for number in range(len(operands))]
    arguments = ", ".join(f"{name}: {_type(operand)}" for name, operand in zip(names, operands, strict=True))
    others = results[of_heads:]
    # The last result is cuDNN's workspace, which XLA sizes once it has chosen an algorithm.
    called = [*map(_heads_first, results[:of_heads]), *others, ((0,), "ui8")]
    layouts = [*([_HEADS_FIRST] * of_heads), *map(_layout, [*others, called[-1]])]
    attributes = (
        f'api_version = 2 : i32, backend_config = "{config}", operand_layouts = [{", ".join(map(_layout, operands))}], '
        f"result_layouts = [{', '.join(layouts)}]"
    )
    lines = [
        f"%0:{len(called)} = stablehlo.custom_call @{target}({', '.join(names)}) {{{attributes}}} : "
        f"({_types(operands)}) -> ({_types(called)})"
    ]
    returned = [f"%t{number}" if number < of_heads else f"%0#{number}" for number in range(len(results))]
    for number, (result, raw) in enumerate(zip(results[:of_heads], called, strict=False)):
        transpose = f"stablehlo.transpose %0#{number}, dims = [0, 2, 1, 3]"
        lines.append(f"%t{number} = {transpose} : ({_type(raw)}) -> {_type(result)}")
    lines.append(f"return {', '.join(returned)} : {_types(results)}")
    body = "\n    ".join(lines)
    return (
        f"module @cudnn_fmha_{name} attributes {{mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 1 : i32}} {{\n"
        f"  func.func public @main({arguments}) -> ({_types(results)}) {{\n    {body}\n  }}\n}}\n"
    )


def _heads_first(result: Type) -> Type:
    """The shape declared for a result with heads: (batch, heads, length, size)."""
    shape, dtype = result
    return (shape[0], shape[2], shape[1], shape[3]), dtype


def _type(tensor: Type) -> str:
    shape, dtype = tensor
    return f"tensor<{'x'.join(map(str, shape))}x{_ELEMENTS.get(dtype, dtype)}>"


def _types(tensors: Iterable[Type]) -> str:
    return ", ".join(map(_type, tensors))


def _layout(tensor: Type) -> str:
    """Axes from fastest to slowest."""
    order = [*range(len(tensor[0]))][::-1]
    return f"dense<{order if len(order) > 1 else order[0]}> : tensor<{len(order)}xindex>"


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
        "mask_type": _mask_type(spec),
        **{f"{name}_dot_dimension_numbers": _dimensions(*sides) for name, sides in products.items()},
        "dropout_rate": 0.0,
        "seed": 42,
        "sliding_window_length": spec.window,
        "max_seg_per_batch": 1,
        "is_paged_attention": False,
    }
    return json.dumps({"operation_queue_id": "0", "cudnn_fmha_backend_config": config}).replace('"', "\\22")


def _mask_type(spec: AttentionSpec) -> str:
    parts = ["PADDING"] * spec.lengths + ["CAUSAL"] * spec.causal
    return "_".join(parts) or "NO_MASK"


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
