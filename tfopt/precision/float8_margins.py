"""How much of float8's range each quantized layer uses: amax history, margin, and what saturates or vanishes.

Keras divides the inputs, kernel and output gradient of a float8 layer by a scale of their own, so that the largest
magnitude of earlier steps (amax) just fits into float8. Source: Micikevicius et al., "FP8 Formats for Deep Learning",
2022; NVIDIA, "Using FP8 with Transformer Engine" (delayed scaling).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.patches import patched
from tfopt.internals.sources import find
from tfopt.text import percent

_HISTORY = 16
# Name in words: Keras' name, float8 format.
_TENSORS = {
    "inputs": ("inputs", "E4M3"),
    "kernel": ("kernel", "E4M3"),
    "output gradient": ("outputs_grad", "E5M2"),
}
# The largest value, and what rounding adds to it at most.
# Share of a tensor's norm that float8's limit may cut off in a batch its scale was not taken from; measured on healthy
# nets: up to 4 %.
SATURATED = 0.2
# Share of the nonzero inputs or weights that may become zero in float8. Unlike the norm, it shows an outlier that
# leaves no room for the other values. Measured on healthy nets: none.
VANISHED = 0.1
# Of an output gradient, the share of its norm counts: ReLU makes many of its values small.
LOST = 0.1
_SMALLEST_FLOAT16 = 2.0**-24
_FORMATS = {"E4M3": (448.0, 16.0), "E5M2": (57344.0, 4096.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Margin:
    """How one tensor of a quantized layer fits into float8."""

    path: str
    """Names from the model down to the layer."""
    tensor: str
    """ "inputs", "kernel" or "output gradient"."""
    format: str
    """ "E4M3", up to 448, or "E5M2", up to 57344."""
    scale: float
    """What values are divided by before they are rounded to float8."""
    amax_history: tuple[float, ...]
    """Largest magnitudes of the last steps, at most 16, newest first; empty before the first step in training."""
    largest: float
    """Largest magnitude: of the batches checked, or of the whole history."""
    saturated: float | None = None
    """Share of elements, 0 to 1, beyond the format's limit after scaling; None without a batch."""
    clipped: float | None = None
    """Share of the norm that those lose."""
    vanished: float | None = None
    """Share of the nonzero elements that become zero."""
    lost: float | None = None
    """Share of the norm in those."""

    @property
    def limit(self) -> float:
        """Largest magnitude that fits at this scale."""
        return _FORMATS[self.format][0] * self.scale

    @property
    def margin(self) -> float | None:
        """How many times as large the largest value could be before it saturates; None if there is no value yet."""
        return self.limit / self.largest if self.largest else None

    def faults(self, compute_dtype: str) -> Iterator[str]:
        """Why training would be wrong, a sentence each: values that float8 cuts off, or makes zero."""
        what = f"the {self.tensor} of {self.path!r} in float8 ({self.format})"
        if self.clipped and self.clipped > SATURATED:
            yield (
                f"Values saturate: {percent(self.clipped)} of the norm of {what} is cut off. The scale, taken from "
                f"earlier batches, fits up to {self.limit:.3g}; the largest value is {self.largest:.3g}. Normalise the "
                "values, or keep the layer out of float8."
            )
        is_gradient = self.tensor == "output gradient"
        share, limit = (self.lost, LOST) if is_gradient else (self.vanished, VANISHED)
        if share and share > limit:
            why = (
                f"The largest value so far sets the scale, and the others are too small beside {self.limit:.3g}: "
                "rescale them"
            )
            if compute_dtype == "float16" and self.scale < _SMALLEST_FLOAT16:
                why = f"float16 rounds a scale below {_SMALLEST_FLOAT16:.2g} to zero: use float8_from_mixed_bfloat16"
            yield (
                f"Values vanish: {percent(share)} of the {'norm' if is_gradient else 'nonzero values'} of {what} "
                f"becomes zero at a scale of {self.scale:.2g}. {why}, or keep the layer out of float8."
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self) | {"limit": self.limit, "margin": self.margin}


class Quantized(NamedTuple):
    """A tensor that was rounded to float8, with the sums that its margin needs, shape (8,)."""

    path: str
    tensor: str
    sums: tf.Tensor


def recorded_margins(paths: Mapping[keras.Layer, str]) -> tuple[Float8Margin, ...]:
    """The margins of the quantized layers by their amax history alone."""
    found = []
    for layer, path in _quantized(paths):
        for tensor, (name, form) in _TENSORS.items():
            history = _history(layer, name)
            newest, largest = tuple(history[:_HISTORY].tolist()), float(history.max(initial=0.0))
            scale = float(getattr(layer, f"{name}_scale").numpy())
            found.append(
                Float8Margin(path=path, tensor=tensor, format=form, scale=scale, amax_history=newest, largest=largest)
            )
    return tuple(found)


def measured_margins(
    paths: Mapping[keras.Layer, str], rows: Iterable[tuple[str, str]], batches: Iterable[np.ndarray[Any, Any]]
) -> tuple[Float8Margin, ...]:
    """The margins of the quantized layers in some batches.

    Args:
        paths: Of the model's layers.
        rows: Path and tensor of each row of sums.
        batches: The sums of each batch, shape (rows, 8).
    """
    by_tensor: dict[tuple[str, str], list[np.ndarray[Any, Any]]] = {}
    for sums in batches:
        for row, its in zip(rows, sums.astype("float64"), strict=True):
            by_tensor.setdefault(row, []).append(its)
    return tuple(
        _with_sums(margin, np.array(by_tensor[margin.path, margin.tensor]))
        for margin in recorded_margins(paths)
        if (margin.path, margin.tensor) in by_tensor
    )


def scales_and_amax(paths: Mapping[keras.Layer, str]) -> np.ndarray[Any, Any]:
    """The scales of the quantized layers, and the largest magnitudes of their last step."""
    margins = recorded_margins(paths)
    return np.array([[margin.scale, (*margin.amax_history, 0.0)[0]] for margin in margins])


@contextmanager
def quantization_recorded(paths: Mapping[keras.Layer, str]) -> Iterator[list[Quantized]]:
    """Records what a graph rounds to float8 while it is traced, forward and backward."""
    recorded: list[Quantized] = []
    # A scale is known by the variable that it is read from.
    scales = {
        id(_root(tf.convert_to_tensor(getattr(layer, f"{name}_scale").value))): (path, tensor)
        for layer, path in _quantized(paths)
        for tensor, (name, _) in _TENSORS.items()
    }

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def quantize_and_dequantize(inputs: Any, scale: Any, quantized_dtype: Any, compute_dtype: Any) -> Any:
            rounded = original(inputs, scale, quantized_dtype, compute_dtype)
            if row := scales.get(id(_root(scale))):
                recorded.append(Quantized(*row, _sums(inputs, rounded, scale, _FORMATS[_TENSORS[row[1]][1]])))
            return rounded

        return quantize_and_dequantize

    if not scales:
        yield recorded
        return
    target = find("keras.src.quantizers:quantize_and_dequantize")
    with patched(*target, recording, by="float8_margins"):
        yield recorded


def _quantized(paths: Mapping[keras.Layer, str]) -> list[tuple[keras.Layer, str]]:
    return [(layer, path) for layer, path in paths.items() if hasattr(layer, "outputs_grad_amax_history")]


def _history(layer: keras.Layer, name: str) -> np.ndarray[Any, Any]:
    """The amax of the steps so far, newest first: Keras writes into place 0, after turning the places backwards."""
    values = getattr(layer, f"{name}_amax_history").numpy()
    newest_first = np.concatenate([values[:1], values[:0:-1]])
    return np.asarray(newest_first[: np.max(np.nonzero(newest_first)[0], initial=-1) + 1])


def _root(tensor: tf.Tensor) -> tf.Tensor:
    while tensor.op.inputs:
        tensor = tensor.op.inputs[0]
    return tensor


def _sums(inputs: tf.Tensor, rounded: tf.Tensor, scale: tf.Tensor, form: tuple[float, float]) -> tf.Tensor:
    values, rounded = (tf.cast(x, tf.float32) for x in (inputs, rounded))
    size = tf.where(tf.math.is_finite(values), tf.abs(values), 0.0)
    largest = tf.reduce_max(size)
    limit, rounding = (part * tf.cast(scale, tf.float32) for part in form)
    over, gone = size > limit + rounding, (size > 0) & (rounded == 0)
    parts = (size, tf.where(over, size - limit, 0.0), tf.where(gone, size, 0.0))
    counts = (tf.size(size), *(tf.math.count_nonzero(x, dtype=tf.int32) for x in (over, size, gone)))
    # In units of the largest value, since squares of tiny ones would vanish.
    squares = [tf.reduce_sum(tf.math.divide_no_nan(part, largest) ** 2) for part in parts]
    return tf.stack([largest, *(tf.cast(count, tf.float32) for count in counts), *squares])


def _with_sums(margin: Float8Margin, sums: np.ndarray[Any, Any]) -> Float8Margin:
    """The margin with its shares in the worst batch; sums have the shape (calls and batches, 8)."""
    largest, count, over, nonzero, gone, whole, clipped, lost = sums.T

    def worst(part: Any, of: Any) -> float:
        return float(np.max(np.divide(part, of, out=np.zeros_like(part), where=of > 0)))

    return replace(
        margin,
        largest=float(largest.max()),
        saturated=worst(over, count),
        clipped=worst(clipped, whole) ** 0.5,
        vanished=worst(gone, nonzero),
        lost=worst(lost, whole) ** 0.5,
    )
