"""`quantize`: a model that computes with integers where that is accurate and faster."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.compress.versions.footprint import Footprint, compared, footprints
from tfopt.compress.versions.rebuilding import rebuilt, require_same
from tfopt.compress.versions.requirements import require_finite, require_single, trial_batch
from tfopt.errors import UnsupportedError
from tfopt.measure import Comparison, compare
from tfopt.model.batches import Data, as_dataset
from tfopt.model.layers import calls_wrapped, layer_paths
from tfopt.text import Shown, aligned, described, percent, wrapped

_MODES = {8: "int8", 4: "int4"}
_MOST_APART = 0.05  # of the outputs' norm
_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Quantized(Shown):
    """A quantized model, beside the original. Its `str` is a table."""

    model: keras.Model
    """The quantized model, compiled like the original; for inference, since integers do not train."""
    bits: int
    """Bits of the weights. With 8, inputs of dense layers are rounded to 8 bits too; with 4, they are not."""
    layers: Mapping[str, float]
    """How far the outputs of each quantized layer, by path, are from the original's on the first batch, as a share of
    their norm."""
    left: Mapping[str, str]
    """Why other layers with weights, by path, compute as before."""
    apart: float
    """How far the model's outputs are from the original's on up to 8 batches of the data, as a share of their norm; of
    several outputs, the one that is furthest off."""
    before: Footprint
    after: Footprint

    @property
    def speedup(self) -> Comparison:
        """Speed of inference over the original's."""
        return compare(self.before.forward, self.after.forward)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values, without the model."""
        return {
            "bits": self.bits,
            "layers": dict(self.layers),
            "left": dict(self.left),
            "apart": self.apart,
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "speedup": self.speedup.to_dict(),
        }

    def __str__(self) -> str:
        lead = (
            f"The weights of {len(self.layers)} layer{'s' * (len(self.layers) != 1)} have {self.bits} bits. Inference "
            f"is {self.speedup}; outputs are {percent(self.apart)} from those before."
        )
        figures = aligned([("", "before", "after"), *compared(self.before, self.after)], texts=1)
        layers = aligned([("layer", "off by"), *((path, percent(off)) for path, off in self.layers.items())], texts=1)
        parts = [wrapped(lead), "\n".join(figures), "\n".join(layers)]
        if self.left:
            parts.append("As before:\n" + "\n".join(described(list(self.left.items()))))
        return "\n\n".join(parts)


def quantize(model: keras.Model, data: Data, bits: int = 8) -> Quantized:
    """Returns a model whose dense layers and embeddings compute with integers, if that is accurate and faster here.

    Use it on a trained model before it serves. Weights take 8 or 4 bits; with 8, the inputs of dense layers are rounded
    to 8 bits as well, when they run. This is Keras' own quantization. The outputs may be up to 5 % from the original's,
    by norm over up to 8 batches of the data; if they are further off, the layers that are least accurate on their own
    compute as before. `model` does not change.

    Keras cannot load a `.keras` file in which layers inside attention, wrappers or classes of your own are quantized;
    `model.export` saves such a model for serving.

    Integers are often slower: if TensorFlow has fast kernels for them at all, they need XLA. Both models are timed in
    turn, as they are compiled, and a quantized model that is not faster is refused, since only its file would be
    smaller.

    Args:
        model: Built and compiled; Functional, Sequential, or one that can be cloned.
        data: A tf.data.Dataset of batches (x, y[, sample_weight]), or one such batch. The first one is timed, and both
            models are evaluated on all of them.
        bits: 8 or 4, of the weights.

    Returns:
        The new model, with the layers that were quantized and those that were left, and figures of both models.

    Raises:
        TypeError: If `model` is not a Keras model, or `data` is neither a dataset nor a batch.
        ValueError: If the model is not compiled or not built, the data never end or the model cannot be evaluated on
            them, or `bits` is neither 8 nor 4.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.TfoptError: If an output has no finite number.
        tfopt.errors.UnsupportedError: If no layer can be quantized, or the outputs would be too far off; if the
            quantized model is not faster here; if a part of the model cannot be built again; or if it trains on several
            replicas.

    Example:
        >>> quantized = tfopt.compress.quantize(model, validation)
        >>> print(quantized)
        The weights of 12 layers have 8 bits. Inference is 1.41 times as fast (95 %: 1.38–1.44); outputs are 1.2 % …
        >>> quantized.model.save("smaller.keras")
    """
    if bits not in tuple(_MODES):
        raise ValueError(f"Expected 8 or 4 bits. Received: {bits!r}. Pass bits=8.")
    require_single(model, "Quantize")
    require_finite(data)
    before = rebuilt(model)
    batch = trial_batch(before, data)
    require_same(model, before, batch, "a clone")
    first = keras.utils.unpack_x_y_sample_weight(batch)[0]
    alone, left = _alone(before, first, bits)
    inputs = [keras.utils.unpack_x_y_sample_weight(one)[0] for one in as_dataset(data).take(_BATCHES)]
    after, chosen, apart = _near(before, alone, inputs, bits)
    paths = layer_paths(before)
    figures = footprints((before, after), data, training=False)
    found = Quantized(
        model=after,
        bits=bits,
        layers={paths[layer]: alone[layer] for layer in chosen},
        left={paths[layer]: why for layer, why in left.items()}
        | {paths[layer]: f"off by {percent(alone[layer])}" for layer in alone if layer not in chosen},
        apart=apart,
        before=figures[0],
        after=replace(figures[1], parameters=figures[0].parameters),  # Keras packs 4-bit ones, and counts scales
    )
    if found.speedup.verdict != "faster":
        raise UnsupportedError(
            f"Expected a model that is faster in {bits} bits here. Found: inference is {found.speedup}, and only the "
            f"weights are smaller, {found.before.mib:.3g} MiB → {found.after.mib:.3g} MiB. What to do: keep the model; "
            "or compile it with jit_compile=True, since TensorFlow's fast kernels for integers are XLA's."
        )
    return found


def _alone(model: keras.Model, inputs: Any, bits: int) -> tuple[dict[keras.Layer, float], dict[keras.Layer, str]]:
    """Returns how far each layer's outputs would be off if it alone were quantized, and why others cannot be."""
    twin = rebuilt(model)
    twins, left = {}, {}
    for layer, other in zip(model._flatten_layers(), twin._flatten_layers(), strict=True):
        if any(len(weight.shape) > 1 for weight in layer._trainable_variables):
            if why := _quantized(other, bits):
                left[layer] = why
            else:
                twins[layer] = other
    if not twins:
        raise UnsupportedError(
            f"Expected layers that Keras computes in {bits} bits. Found none in {model.name!r}{_reasons(model, left)}. "
            "Leave the model as it is."
        )
    off: dict[keras.Layer, float] = {}

    def recorded(layer: keras.Layer, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            if tf.executing_eagerly():
                apart = _distance([result], [twins[layer].quantized_call(*args, **kwargs)])
                off[layer] = max(apart, off.get(layer, 0.0))
            return result

        return call

    with calls_wrapped(twins, recorded):
        model(inputs, training=False)
    past = _called_otherwise(twin, twins.values(), inputs)
    left |= {layer: "the layer around it calls it past its integers" for layer in off if twins[layer] in past}
    left |= {layer: "it was not called on its own" for layer in twins if layer not in off}
    return {layer: apart for layer, apart in off.items() if layer not in left}, left


def _called_otherwise(twin: keras.Model, layers: Iterable[keras.Layer], inputs: Any) -> set[keras.Layer]:
    """The quantized layers whose `call` another layer, such as TimeDistributed, calls itself, past their integers."""
    found = set()

    def noted(layer: Any, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if method.__name__ == "call":
                found.add(layer)
                return layer.quantized_call(*args, **kwargs)
            return method(*args, **kwargs)

        return call

    with calls_wrapped(layers, noted):
        twin(inputs, training=False)
    return found


def _reasons(model: keras.Model, left: Mapping[keras.Layer, str]) -> str:
    paths = layer_paths(model)
    return "".join(f"; {paths[layer]}: {why.rstrip('.')}" for layer, why in left.items())


def _quantized(layer: Any, bits: int) -> str | None:
    """Quantizes a layer in place; returns why it cannot be."""
    try:
        layer.quantize(_MODES[bits])
    except NotImplementedError:
        kind = type(layer).__name__
        return f"Keras has no {bits}-bit {kind}" if type(layer).__module__.startswith("keras.") else "its own class"
    except Exception as error:  # noqa: BLE001  such as LoRA's, or a size that does not fit
        return str(error).splitlines()[0]
    return None


def _near(
    model: keras.Model, alone: Mapping[keras.Layer, float], inputs: Sequence[Any], bits: int
) -> tuple[keras.Model, list[keras.Layer], float]:
    """Returns the model with as many layers quantized as its outputs bear, those layers, and how far it is off."""
    best_first = sorted(alone, key=alone.__getitem__)
    expected = _outputs(model, inputs)
    low, count, high = 0, len(alone), len(alone)
    found: tuple[keras.Model, list[keras.Layer], float] | None = None
    while low < high:
        chosen = best_first[:count]
        twin = rebuilt(model)
        for layer, other in zip(model._flatten_layers(), twin._flatten_layers(), strict=True):
            if layer in chosen:
                _quantized(other, bits)
        apart = _distance(expected, _outputs(twin, inputs))
        if apart <= _MOST_APART:
            low, found = count, (twin, [layer for layer in alone if layer in chosen], apart)
        else:
            high = count - 1
        count = (low + high + 1) // 2
    if found is None:
        remedy = "pass bits=8" if bits == 4 else "keep the model as it is"
        raise UnsupportedError(
            f"Expected outputs within {percent(_MOST_APART)} of the model's in {bits} bits. Found: they are further "
            f"off even with one layer quantized. What to do: {remedy}."
        )
    return found


def _outputs(model: keras.Model, inputs: Iterable[Any]) -> list[Any]:
    with keras.StatelessScope():  # in which no layer's seeds or state move
        return [model(one, training=False) for one in inputs]


def _distance(expected: Iterable[Any], found: Iterable[Any]) -> float:
    """Returns the norm of the difference over that of the expected values, where finite; of the output furthest off.

    An output of zeros counts by the norm of all; infinity if a number was lost.
    """
    outputs = [zip(*map(keras.tree.flatten, batches), strict=True) for batches in (expected, found)]
    off, size = np.array([_squares(*pair) for pair in zip(*outputs, strict=True)]).T
    apart = np.sqrt(off / np.maximum(np.where(size > 0, size, size.sum()), 1e-300))
    return math.inf if np.isnan(apart).any() else float(apart.max())


def _squares(expected: Iterable[Any], found: Iterable[Any]) -> tuple[float, float]:
    """Returns the squared norms of the difference of an output, and of its expected values."""
    off = size = 0.0
    for pair in zip(expected, found, strict=True):
        a, b = (np.asarray(tf.cast(part, tf.float32), "float64") for part in pair)
        known = np.isfinite(a)
        off += float(((b - a)[known] ** 2).sum())
        size += float((a[known] ** 2).sum())
    return off, size
