"""`alignment`: which layers miss the sizes that Tensor Cores want."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.model.layers import is_built, require_model
from tfopt.model.products import Dimension, LayerCall, Products, has_kernel, layer_calls, matrix_products
from tfopt.model.undoing import only_looks
from tfopt.text import Shown, aligned, listed

# NVIDIA, "Matrix Multiplication Background User's Guide", Tensor Core Requirements: M, N and K should be multiples of
# 16 bytes, and are most efficient at multiples of 128 bytes on an A100. "Transformer Engine" wants 16 for FP8 as well.
_ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8": 1, "int8": 1}
_NEEDED_BYTES, _BEST_BYTES = 16, 128
_RULES = (
    "Multiples after NVIDIA's Matrix Multiplication Background User's Guide, for compute capability 8.0 and later\n"
    "(float8: 8.9); on 7.x only float16 uses Tensor Cores. Other sizes run too, but slower; measure what padding gains."
)
_NAMES_LISTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A dimension that is not a multiple of 16 bytes, in one layer or in several alike."""

    layers: tuple[str, ...]
    """Paths of the layers."""
    dimension: str
    """Its role in them."""
    size: int
    dtype: str
    """What they compute in."""
    multiple: int
    """The size should be a multiple of this."""
    next_size: int
    """The next such size."""
    best_size: int
    """The next multiple of 128 bytes, most efficient on A100 and later."""
    padding_percent: float
    """How much padding to `next_size` adds to the multiply-adds of these layers."""
    share_percent: float | None
    """Their share of the model's multiply-adds; None if any size in the model is unknown."""
    note: str
    """How to pad, or why not to."""


@dataclass(frozen=True, slots=True)
class Remark:
    """Layers that a remark applies to."""

    reason: str
    layers: tuple[str, ...]
    """Paths of the layers."""

    def __str__(self) -> str:
        return f"{self.reason}: {listed(self.layers, _NAMES_LISTED)}."


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AlignmentReport(Shown):
    """Sizes that keep layers off the fast Tensor Core kernels, as `alignment` found them. Its `str` is a table."""

    model: str
    """Name of the model."""
    batch_size: int
    misses: tuple[Miss, ...]
    """Worst first, by multiply-adds of the layers, with unknown sizes taken as one."""
    below_best: int
    """How many other sizes are multiples of 16 bytes but not of 128."""
    multiply_adds: int
    """Of a forward pass, in layers of known sizes."""
    unknown: tuple[Remark, ...]
    """Layers that could not be judged, or only in part."""
    without_tensor_cores: tuple[Remark, ...]
    """Layers whose products do not run on Tensor Cores."""

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        found = "sizes that miss Tensor Core multiples" if self.misses else "no size misses a Tensor Core multiple"
        lines = [f"Alignment of {self.model} at batch size {self.batch_size:,}: {found}"]
        if self.misses:
            head = ("layers", "dimension", "multiple", "size", "next", "padding", "of all", "A100 best")
            lines += aligned([head, *map(_cells, self.misses)], texts=3)
        lines += dict.fromkeys(f"{miss.dimension} {miss.size:,}: {miss.note}." for miss in self.misses if miss.note)
        if self.below_best:
            lines.append(f"Multiples of 16 bytes, but not of 128, at which A100 and later are best: {self.below_best}.")
        lines += [f"Not judged in full: {remark}" for remark in self.unknown]
        lines += [f"No Tensor Cores: {remark}" for remark in self.without_tensor_cores]
        return "\n".join([*lines, _RULES])


class _Use(NamedTuple):
    """One call of a layer, with what it multiplies."""

    call: LayerCall
    products: Products


@only_looks
def alignment(model: keras.Model, batch_size: int) -> AlignmentReport:
    """Names the layers whose sizes miss the multiples that Tensor Cores want for their compute dtype.

    Use it before a long training: a vocabulary of 50,257, a head of 60 or a batch of 100 can rule out fast kernels. It
    reads shapes and runs nothing. It judges the matrix products of dense, einsum, convolution, attention and recurrent
    layers, not products in custom code; the report says which layers have unknown sizes, such as a sequence length of
    None. The backward pass multiplies the same dimensions. In a model without a `call`, such as a GAN, each network
    counts once.

    The multiples are 8 for float16 and bfloat16, 4 for float32, which runs as TF32, and 16 for float8. float64 is not
    judged: few GPUs (A100, H100) have Tensor Cores for it. docs/precision.md names the sources.

    Args:
        model: A built model; compiled or not.
        batch_size: Examples in a step on one GPU.

    Returns:
        Each size that misses, worst first, with the next good one and what padding costs in multiply-adds.

    Raises:
        TypeError: If `model` is not a Keras model, or `batch_size` not an integer.
        ValueError: If `batch_size` is below 1, the model is not built, or no layer of it multiplies matrices.

    Example:
        >>> print(tfopt.precision.alignment(model, batch_size=16))
        Alignment of gpt at batch size 16: sizes that miss Tensor Core multiples
          layers     dimension  multiple        size    next    padding   of all  A100 best
          head       outputs    8 (bfloat16)  50,257  50,264  +0.0139 %   95.9 %     50,304
          attention  head size  8 (bfloat16)      60      64    +6.67 %  0.458 %         64
        …
    """
    require_model(model)
    batch_size = checks.integer("batch_size", batch_size, "Give the examples in a step.", least=1)
    _require_built(model)
    calls = list(layer_calls(model, batch_size))
    uses = [_Use(call, products) for call in calls if (products := matrix_products(call))]
    unknown = _unknown(calls, uses)
    if not (uses or unknown):
        raise ValueError(
            f"Expected a model with dense, convolution, attention or recurrent layers. Received: {model.name!r}, "
            "whose layers multiply no matrices. Tensor Cores cannot help it; leave its sizes as they are."
        )
    judged = [use for use in uses if use.call.dtype in _ITEM_BYTES and _off_tensor_cores(use) is None]
    total = sum(use.products.multiply_adds or 0 for use in uses)
    known = all(use.products.multiply_adds is not None for use in uses)
    return AlignmentReport(
        model=model.name,
        batch_size=batch_size,
        misses=_misses(judged, total if known else None, _vocabularies(model)),
        below_best=_below_best(judged),
        multiply_adds=total,
        unknown=unknown,
        without_tensor_cores=_remarks((reason, use.call.path) for use in uses if (reason := _off_tensor_cores(use))),
    )


def _require_built(model: keras.Model) -> None:
    if isinstance(model, keras.Sequential) and not model.layers:
        raise ValueError(f"Expected a model with layers. Received: {model.name!r}, which has none. Add them first.")
    if not is_built(model):
        raise ValueError(
            f"Expected a built model. Received: {model.name!r}, whose layers have no shapes yet. "
            "Call model.build(input_shape), or the model on one batch, first."
        )


def _off_tensor_cores(use: _Use) -> str | None:
    """Why a call's products do not run on Tensor Cores; None if they do."""
    if not use.products.dimensions:
        return "each channel is convolved alone, which is no matrix product"
    if use.call.dtype == "float64":
        return "float64, which most GPUs' Tensor Cores do not take"
    if use.call.dtype == "float32" and not tf.config.experimental.tensor_float_32_execution_enabled():
        return "float32 with TF32 switched off"
    return None


def _unknown(calls: Iterable[LayerCall], uses: Iterable[_Use]) -> tuple[Remark, ...]:
    found = []
    for use in uses:
        if _off_tensor_cores(use):
            continue
        if use.call.dtype not in _ITEM_BYTES:
            found.append((f"no multiples are known for {use.call.dtype}", use.call.path))
        elif use.products.multiply_adds is None:
            found.append(("a length or size of the input is None", use.call.path))
    multiplying = {use.call.layer for use in uses}
    for call in calls:
        reverses = isinstance(call.layer, keras.layers.ReversibleEmbedding)
        if call.layer not in multiplying and (reverses or has_kernel(call.layer)):
            found.append(("what it does with its kernel is its own", call.path))
    return _remarks(found)


def _remarks(found: Iterable[tuple[str, str]]) -> tuple[Remark, ...]:
    """A remark per reason, from pairs of reason and path."""
    by_reason: dict[str, dict[str, None]] = defaultdict(dict)
    for reason, path in found:
        by_reason[reason][path] = None
    return tuple(Remark(reason, tuple(paths)) for reason, paths in by_reason.items())


def _misses(uses: Iterable[_Use], total: int | None, vocabularies: Mapping[int, str]) -> tuple[Miss, ...]:
    """Identical misses are grouped: a block repeated twelve times misses once."""
    alike: dict[tuple[Dimension, str], list[_Use]] = defaultdict(list)
    for use in uses:
        for dimension in use.products.dimensions:
            if (dimension.size or 0) * _ITEM_BYTES[use.call.dtype] % _NEEDED_BYTES:
                alike[dimension, use.call.dtype].append(use)
    worst_first = sorted(alike.items(), key=lambda item: -sum(use.products.at_least() for use in item[1]))
    return tuple(_miss(*key, group, total, vocabularies) for key, group in worst_first)


def _miss(
    dimension: Dimension, dtype: str, uses: list[_Use], total: int | None, vocabularies: Mapping[int, str]
) -> Miss:
    multiple, best = (size // _ITEM_BYTES[dtype] for size in (_NEEDED_BYTES, _BEST_BYTES))
    next_size = dimension.padded(multiple)
    padded = sum(use.products.at_least(dimension.name, next_size) for use in uses)
    work = sum(use.products.at_least() for use in uses)
    return Miss(
        layers=tuple(dict.fromkeys(use.call.path for use in uses)),
        dimension=dimension.name,
        size=dimension.size or 0,
        dtype=dtype,
        multiple=multiple,
        next_size=next_size,
        best_size=dimension.padded(best),
        padding_percent=100 * (padded / work - 1),
        share_percent=100 * work / total if total else None,
        note=_note(dimension, next_size, vocabularies),
    )


def _note(dimension: Dimension, next_size: int, vocabularies: Mapping[int, str]) -> str:
    if dimension.name.startswith("batch"):
        return f"batch size {next_size // dimension.step}"
    if dimension.name == "input channels" and dimension.size in (1, 3):
        return "an image's, cheap to leave: cuDNN pads it; NVIDIA finds 4 enough for 3 where the stride is 2"
    embedding = vocabularies.get(dimension.size or 0)
    if dimension.name == "outputs" and embedding:
        return f"the vocabulary, also of {embedding}; pad it with tokens that never occur"
    return ""


def _below_best(uses: Iterable[_Use]) -> int:
    """How many sizes are multiples of 16 bytes but not of 128."""
    dtypes = {(use.call.path, dimension): use.call.dtype for use in uses for dimension in use.products.dimensions}
    sizes_bytes = [(dimension.size or 0) * _ITEM_BYTES[dtype] for (_, dimension), dtype in dtypes.items()]
    return sum(size % _NEEDED_BYTES == 0 and size % _BEST_BYTES != 0 for size in sizes_bytes)


def _vocabularies(model: keras.Model) -> dict[int, str]:
    """Paths of embeddings by their vocabulary size."""
    embeddings = (layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding))
    return {layer.input_dim: layer.path or layer.name for layer in embeddings}


def _cells(miss: Miss) -> tuple[str, ...]:
    return (
        listed(miss.layers, 1),
        miss.dimension,
        f"{miss.multiple} ({miss.dtype})",
        f"{miss.size:,}",
        f"{miss.next_size:,}",
        f"+{miss.padding_percent:.3g} %",
        "unknown" if miss.share_percent is None else f"{miss.share_percent:.3g} %",
        f"{miss.best_size:,}",
    )
