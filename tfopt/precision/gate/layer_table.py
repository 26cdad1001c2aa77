"""How far each layer is from float32: counted in the graph, summed into one row per layer."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The distance of some tensors from float32, in the worst batch."""

    error: float
    """Norm of the difference over the norm in float32, both over finite values; infinite if only that norm is zero."""
    overflow: float
    """Share of elements, 0 to 1, that are finite in float32 and not in the other dtype."""
    underflow: float
    """Share of the elements that are nonzero in float32 and zero in the other dtype."""
    lost: float
    """Share of the float32 norm, 0 to 1, in the underflowing elements: whether those zeros matter."""
    largest: float
    """Largest magnitude in float32."""
    norm: float
    """Norm in float32."""
    difference: float
    """Norm of the difference."""

    def to_dict(self) -> dict[str, Any]:
        """JSON, with null for values that are not finite."""
        return {name: finite_or_none(value) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPrecision:
    """How far one layer is from float32, in the worst batch.

    A deviation is None where there is nothing to compare: integers, frozen weights, tensors that do not reach the loss.
    """

    path: str
    """Names from the model down to the layer."""
    kind: str
    """Its class."""
    policy: str
    """The dtype policy it was checked under."""
    output: Deviation | None = None
    input: Deviation | None = None
    """After the cast to the layer's own dtype: the error it inherits."""
    weight_gradient: Deviation | None = None
    """Gradients of its weights, and of those inside it that have no row of their own, as one vector."""
    output_gradient: Deviation | None = None
    """The gradient that reaches it."""
    input_gradient: Deviation | None = None
    """The gradient that it passes on."""
    blamed: bool = False
    """Whether it is at the root of a problem."""

    @property
    def own_error(self) -> float:
        """Error of its output beyond the inherited one, for independent errors: √(output² - input²)."""
        output, inherited = (part.error if part else 0.0 for part in (self.output, self.input))
        return math.sqrt(max(0.0, output**2 - inherited**2)) if math.isfinite(output) else math.inf

    @property
    def severity(self) -> tuple[float, ...]:
        """Sort key of tables: blamed first, then overflow, lost gradient and error."""
        gradient = self.weight_gradient
        overflow = max((part.overflow for part in (self.output, gradient) if part), default=0.0)
        # Traces of underflow are everywhere; below one percent they rank no layer.
        lost = round(gradient.lost, 2) if gradient else 0.0
        return self.blamed, overflow, lost, self.output.error if self.output else 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts = {name: value.to_dict() for name, value in values.items() if isinstance(value, Deviation)}
        return values | parts | {"own_error": finite_or_none(self.own_error)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTable:
    """A model under a policy compared with float32, layer by layer; the verdict rests on this alone."""

    calls: tuple[LayerPrecision, ...]
    """A row per call of a layer, in the order in which the calls end, without gradients of weights."""
    layers: tuple[LayerPrecision, ...]
    """A row per layer, with all its calls as one."""
    policies: Mapping[str, keras.DTypePolicy]
    """The policy of every layer by path, including layers without a row."""
    heads: tuple[str, ...]
    """Layers that make the model's outputs in 16 bits; the model's own path if an operation does."""
    softmaxes: tuple[str, ...]
    """Softmaxes in 16 bits whose result becomes a model output in another dtype."""
    reference_loss: float
    """Mean loss in float32."""
    candidate_loss: float
    """Mean loss under the policy."""
    drift_limit: float
    """How far the losses may differ, relative to the one in float32."""

    @property
    def first_overflow(self) -> LayerPrecision | None:
        """The first call whose output overflows."""
        return next((call for call in self.calls if call.output and call.output.overflow), None)

    @property
    def suspects(self) -> list[str]:
        """The layers with the largest own errors among those not in float32, worst first.

        An eighth of them, so that a few rounds of taking suspects back to float32 get somewhere.
        """
        policies = self.policies
        changed = [x for x in self.layers if self.dtype(x.path) != "float32" or policies[x.path].quantization_mode]
        ranked = sorted(changed, key=lambda layer: layer.own_error, reverse=True)
        return [layer.path for layer in ranked[: -(-len(ranked) // 8)]]

    def dtype(self, path: str) -> str:
        """The dtype a layer computes in."""
        return str(self.policies[path].compute_dtype)


@tf.function(
    input_signature=[tf.TensorSpec([None], tf.float32)] * 2,
    autograph=False,
    experimental_attributes={"_noinline": True},  # inlined for every tensor, it took longer to optimise than to run
)
def _moments(reference: tf.Tensor, candidate: tf.Tensor) -> tf.Tensor:
    known = tf.math.is_finite(reference)
    both = known & tf.math.is_finite(candidate)
    zero = tf.zeros_like(reference)
    reference = tf.where(known, reference, zero)
    # Squares of large or tiny values leave float32's range, so the sums are in units of the largest value.
    largest = tf.maximum(tf.reduce_max(tf.abs(reference)), 0.0)  # the maximum of an empty tensor is -inf
    unit = tf.maximum(tf.reduce_max(tf.where(both, tf.abs(candidate), zero)), largest)
    difference = tf.where(both, tf.math.divide_no_nan(candidate, unit) - tf.math.divide_no_nan(reference, unit), zero)
    squares = tf.math.divide_no_nan(reference, unit) ** 2
    vanished = both & (candidate == 0) & (reference != 0)
    counts = (known, known & ~both, reference != 0, vanished)
    sums = (squares, difference**2, tf.where(vanished, squares, zero))
    return tf.stack(
        [
            tf.cast(tf.size(known) - tf.math.count_nonzero(known, dtype=tf.int32), tf.float32),
            *(tf.math.count_nonzero(count, dtype=tf.float32) for count in counts),
            *(tf.reduce_sum(part) for part in sums),
            unit,
            largest,
        ]
    )


def moments(reference: Any, candidate: Any) -> tf.Tensor:
    """What `worst_deviation` needs of a tensor in two dtypes, shape (10,), so that no tensor leaves the graph."""
    flat = [tf.reshape(tf.cast(tf.convert_to_tensor(value), tf.float32), [-1]) for value in (reference, candidate)]
    return _moments(*flat)


def worst_deviation(batches: Iterable[np.ndarray[Any, Any]]) -> Deviation:
    """The deviation of some tensors taken together.

    Args:
        batches: For each batch the moments of every tensor, shape (tensors, 10).
    """
    each = [_of_batch(batch.astype("float64")) for batch in batches]
    # Python's max() ignores a NaN or not, depending on its place.
    return Deviation(**{name: float(np.max([part[name] for part in each])) for name in each[0]})


def not_finite(moments: np.ndarray[Any, Any]) -> bool:
    """Whether float32 itself has NaN or infinity, from moments of shape (tensors, 10)."""
    return bool(moments[:, 0].any())


def finite_or_none(value: float) -> float | None:
    """A number as JSON can hold it."""
    return value if math.isfinite(value) else None


def _of_batch(moments: np.ndarray[Any, Any]) -> dict[str, float]:
    _, known, overflowed, nonzero, vanished, *sums, unit, largest = moments.T
    total, difference, lost = (float(np.sum(part * unit**2)) for part in sums)
    return {
        "error": _ratio(math.sqrt(difference), math.sqrt(total)),
        "overflow": _ratio(overflowed.sum(), known.sum()),
        "underflow": _ratio(vanished.sum(), nonzero.sum()),
        "lost": _ratio(math.sqrt(lost), math.sqrt(total)),
        "largest": float(largest.max(initial=0.0)),
        "norm": math.sqrt(total),
        "difference": math.sqrt(difference),
    }


def _ratio(part: float, whole: float) -> float:
    if not part:
        return 0.0
    return float(part / whole) if whole else math.inf
