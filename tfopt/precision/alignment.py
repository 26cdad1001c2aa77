"""Which layers miss the sizes that Tensor Cores want."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import NamedTuple

import keras
import tensorflow as tf

from tfopt.model.layers import LayerCall, layer_calls
from tfopt.model.products import Dimension, Products, matrix_products
from tfopt.precision.alignment_report import AlignmentReport, Miss, Remark

# NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core Requirements: M, N and K should be multiples of
# 16 bytes, and are most efficient at multiples of 128 bytes on an A100. "Transformer Engine" wants 16 for FP8 as well.
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8": 1, "int8": 1}
_NEEDED_BYTES, _BEST_BYTES = 16, 128
# Layers with a kernel of two dimensions or more that is looked up or multiplied by element.
_NO_PRODUCTS = keras.layers.Embedding | keras.layers.LayerNormalization | keras.layers.PReLU


class _Use(NamedTuple):
    """One call of a layer, with what it multiplies."""

    call: LayerCall
    products: Products


def alignment(model: keras.Model, batch_size: int) -> AlignmentReport:
    """Names the layers whose sizes miss the multiples that Tensor Cores want for their compute dtype.

    Use it before a long training: a vocabulary of 50,257, a head of 60 or a batch of 100 can keep fast kernels away.
    It reads shapes and runs nothing. Judged are the matrix products of dense, einsum, convolution, attention and
    recurrent layers, not those that a layer's or model's own code makes; where a size is None, such as a free sequence
    length, the report says so. The backward pass multiplies the same dimensions.

    The multiples are 8 for float16 and bfloat16, 4 for float32, which runs as TF32, and 16 for float8. float64 is not
    judged: few GPUs (A100, H100) have Tensor Cores for it. Sources: NVIDIA, "Matrix Multiplication Background User's
    Guide" (Tensor Core Requirements), "Linear/Fully-Connected Layers User's Guide", "Convolutional Layers User's
    Guide" (Channels In And Out), "Recurrent Layers User's Guide"; cuDNN release notes 7.3.0 (it pads channels itself).

    Args:
        model: A built model; compiled or not.
        batch_size: Examples in a step on one GPU.

    Returns:
        Each size that misses, worst first, with the next good one and what padding costs in multiply-adds.

    Raises:
        TypeError: `model` is no Keras model, or `batch_size` no integer.
        ValueError: `batch_size` is below 1, the model is not built, or no layer of it multiplies matrices.

    Example:
        >>> print(tfopt.precision.alignment(model, batch_size=16))
        Alignment of gpt at batch size 16: sizes that miss Tensor Core multiples
          layers     dimension  multiple        size    next    padding   of all  A100 best
          head       outputs    8 (bfloat16)  50,257  50,264  +0.0139 %   95.9 %     50,304
          attention  head size  8 (bfloat16)      60      64    +6.67 %  0.458 %         64
        …
    """
    _check(model, batch_size)
    uses, unknown, without = _judge(model, int(batch_size))
    if not (uses or unknown or without):
        raise ValueError(
            f"Expected a model with dense, convolution, attention or recurrent layers. Received: {model.name!r}, "
            "whose layers multiply no matrices. Tensor Cores have nothing to do there; leave its sizes as they are."
        )
    judged = [use for use in uses if use.call.dtype in _ITEM_BYTES and _elsewhere(use) is None]
    total = sum(use.products.multiply_adds or 0 for use in uses)
    known = all(use.products.multiply_adds is not None for use in uses)
    return AlignmentReport(
        model=model.name,
        batch_size=int(batch_size),
        misses=_misses(judged, total if known else None, _vocabularies(model)),
        below_best=_below_best(judged),
        multiply_adds=total,
        unknown=_remarks(unknown),
        without_tensor_cores=_remarks(without),
    )


def _check(model: keras.Model, batch_size: int) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"Expected a Keras model. Received: {model!r}. Put layers into a keras.Sequential.")
    if isinstance(batch_size, bool) or not isinstance(batch_size, Integral):
        raise TypeError(f"Expected batch_size to be an integer. Received: {batch_size!r}. Give the examples in a step.")
    if batch_size < 1:
        raise ValueError(f"Expected batch_size to be at least 1. Received: {batch_size}. Give the examples in a step.")
    if isinstance(model, keras.Sequential) and not model.layers:
        raise ValueError(f"Expected a model with layers. Received: {model.name!r}, which has none. Add them first.")
    if not model.built:
        raise ValueError(
            f"Expected a built model. Received: {model.name!r}, whose layers have no shapes yet. "
            "Call model.build(input_shape), or the model on one batch, first."
        )


def _judge(model: keras.Model, batch_size: int) -> tuple[list[_Use], dict[str, list[str]], dict[str, list[str]]]:
    """The calls with products, and by reason the layers of unknown sizes and those that use no Tensor Cores."""
    unknown, without = defaultdict(list), defaultdict(list)
    calls = list(layer_calls(model, batch_size))
    uses = [_Use(call, products) for call in calls if (products := matrix_products(call))]
    for use in uses:
        if reason := _elsewhere(use):
            without[reason].append(use.call.path)
        elif use.call.dtype not in _ITEM_BYTES:
            unknown[f"no multiples are known for {use.call.dtype}"].append(use.call.path)
        elif use.products.multiply_adds is None:
            unknown["a length or size of the input is None"].append(use.call.path)
    multiplying = {use.call.layer for use in uses}
    for call in calls:
        if call.layer not in multiplying and _has_kernel(call.layer):
            unknown["what it does with its kernel is its own"].append(call.path)
    return uses, unknown, without


def _elsewhere(use: _Use) -> str | None:
    """Why a call's products do not run on Tensor Cores, or None."""
    if not use.products.dimensions:
        return "each channel is convolved alone, which is no matrix product"
    if use.call.dtype == "float64":
        return "float64, which most GPUs' Tensor Cores do not take"
    if use.call.dtype == "float32" and not tf.config.experimental.tensor_float_32_execution_enabled():
        return "float32 with TF32 switched off"
    return None


def _has_kernel(layer: keras.Layer) -> bool:
    if isinstance(layer, _NO_PRODUCTS) and not isinstance(layer, keras.layers.ReversibleEmbedding):
        return False
    return any(len(weight.shape) > 1 for weight in layer._trainable_variables)


def _misses(uses: Iterable[_Use], total: int | None, vocabularies: Mapping[int, str]) -> tuple[Miss, ...]:
    """Alike ones together: a block that is repeated twelve times misses once."""
    alike: dict[tuple[Dimension, str], list[_Use]] = defaultdict(list)
    for use in uses:
        for dimension in use.products.dimensions:
            if dimension.size and dimension.size % _multiple(use.call.dtype, _NEEDED_BYTES):
                alike[dimension, use.call.dtype].append(use)
    worst_first = sorted(alike.items(), key=lambda item: -sum(use.products.at_least() for use in item[1]))
    return tuple(_miss(*key, group, total, vocabularies) for key, group in worst_first)


def _miss(
    dimension: Dimension, dtype: str, uses: list[_Use], total: int | None, vocabularies: Mapping[int, str]
) -> Miss:
    next_size = dimension.padded(_multiple(dtype, _NEEDED_BYTES))
    padded = sum(use.products.at_least(dimension.name, next_size) for use in uses)
    work = sum(use.products.at_least() for use in uses)
    return Miss(
        layers=tuple(dict.fromkeys(use.call.path for use in uses)),
        dimension=dimension.name,
        size=dimension.size or 0,
        dtype=dtype,
        multiple=_multiple(dtype, _NEEDED_BYTES),
        next_size=next_size,
        best_size=dimension.padded(_multiple(dtype, _BEST_BYTES)),
        padding_percent=100 * (padded / work - 1),
        share_percent=100 * work / total if total else None,
        note=_note(dimension, next_size, vocabularies),
    )


def _below_best(uses: Iterable[_Use]) -> int:
    """How many sizes are multiples of 16 bytes and not of 128."""
    sizes = {(use.call.path, dimension): use.call.dtype for use in uses for dimension in use.products.dimensions}
    known = [(dimension.size, dtype) for (_, dimension), dtype in sizes.items() if dimension.size]
    good = [(size, dtype) for size, dtype in known if size % _multiple(dtype, _NEEDED_BYTES) == 0]
    return sum(size % _multiple(dtype, _BEST_BYTES) != 0 for size, dtype in good)


def _note(dimension: Dimension, next_size: int, vocabularies: Mapping[int, str]) -> str:
    if dimension.name.startswith("batch"):
        return f"batch size {next_size // dimension.step}"
    if dimension.name == "input channels" and dimension.size in (1, 3):
        return "an image's, cheap to leave: cuDNN pads it; NVIDIA finds 4 enough for 3 where the stride is 2"
    embedding = vocabularies.get(dimension.size or 0)
    if dimension.name == "outputs" and embedding:
        return f"the vocabulary, also of {embedding}; tokens that never occur pad it"
    return ""


def _vocabularies(model: keras.Model) -> dict[int, str]:
    embeddings = (layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding))
    return {layer.input_dim: layer.path or layer.name for layer in embeddings}


def _multiple(dtype: str, size_bytes: int) -> int:
    return size_bytes // _ITEM_BYTES[dtype]


def _remarks(found: Mapping[str, list[str]]) -> tuple[Remark, ...]:
    return tuple(Remark(reason, tuple(dict.fromkeys(paths))) for reason, paths in found.items())
