"""Formulas that some dtype cannot hold, each in a layer, in a lambda and in a model's own call.

What is right of each is known by computing it alone, in 16 bits and in float64: `wrong_share`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from precision_matrix.case import EXAMPLES
from precision_matrix.nets import compiled, cross_entropy, random

layers, ops = keras.layers, keras.ops
ROWS = EXAMPLES
WRONG, FINE = 0.3, 0.1
"""Distance from float64 over its norm, from which a result is wrong, and up to which it is fine.

It may be twice as far in units of what tells the rows apart.
"""


@dataclass(frozen=True)
class Formula:
    """What a layer computes of its input."""

    compute: Callable[[Any], Any]
    make_input: Callable[[], np.ndarray]
    wrong_in: str
    """"float16", "bfloat16" or both: where the result is wrong."""
    by_feature: bool = False
    """Whether one feature of the result, the worst, tells."""


def wrong_share(formula: Formula, dtype: str) -> tuple[float, float]:
    """Distance of the result in a dtype from the one in float64: over its norm, and over what varies between rows.

    The first is infinite if the result is not finite, the second zero if nothing varies.
    """
    x = formula.make_input()
    expected = formula.compute(tf.constant(x, "float64")).numpy().astype("float64")
    in_a_graph = tf.function(formula.compute, autograph=False)  # where TensorFlow makes log1p of log(1 + x)
    found = tf.cast(in_a_graph(tf.cast(tf.constant(x), dtype)), "float64").numpy()
    if not np.isfinite(found).all():
        return float("inf"), float("inf")
    axis = tuple(range(found.ndim - 1)) if formula.by_feature else None
    error = np.sqrt(((found - expected) ** 2).sum(axis))
    varies = np.sqrt(((expected - expected.mean(0)) ** 2).sum(axis))
    hidden = np.where(varies > 1e-9 * np.abs(expected).max(), error / np.maximum(varies, 1e-30), 0)
    return float((error / np.sqrt((expected**2).sum(axis))).max()), float(hidden.max())


def normal(*shape, scale=1.0, shift=0.0):
    return lambda: (scale * random().normal(size=(ROWS, *shape)) + shift).astype("float32")


def uniform(*shape, low=0.0, high=1.0):
    return lambda: random().uniform(low, high, size=(ROWS, *shape)).astype("float32")


def of_rows_apart(*shape):
    """Uniform, times another number in each row, so that means and sums tell the rows apart."""
    return lambda: uniform(*shape)() * random(3).uniform(0.5, 1.5, size=(ROWS, *[1] * len(shape))).astype("float32")


def with_empty_rows(*shape):
    def make():
        x = normal(*shape)()
        x[::4] = 0
        return x

    return make


def sinusoids(places, width=16):
    """Angles are places times frequencies, in the dtype of the places."""
    rates = ops.cast(ops.exp(-ops.arange(width // 2, dtype="float32")), places.dtype)
    angles = ops.expand_dims(places, -1) * rates
    return ops.concatenate([ops.sin(angles), ops.cos(angles)], -1)


def places(x):
    return ops.cast(ops.arange(x.shape[1]), x.dtype)


def positions(x):
    return 0 * x + sinusoids(places(x), x.shape[-1])


def rotated(x):
    width = x.shape[-1] // 2
    both = sinusoids(places(x), x.shape[-1])
    sine, cosine = both[:, :width], both[:, width:]
    one, two = x[..., :width], x[..., width:]
    return ops.concatenate([one * cosine - two * sine, two * cosine + one * sine], -1)


def _decayed(x):
    rate = ops.cast(0.999, x.dtype)
    age = ops.cast(ops.arange(x.shape[1])[::-1], x.dtype)
    return ops.sum(x * ops.power(rate, age)[:, None], 1)


def _variance(x):
    return ops.mean(x**2, 1) - ops.mean(x, 1) ** 2


def _by_squares(x):
    return x / ops.sqrt(ops.sum((300 * x) ** 2, -1, keepdims=True))


def _log_of_sum(x):
    return ops.log(ops.sum(ops.exp(x), -1, keepdims=True))


def _distances(x):
    return ops.sqrt(ops.sum((x[:, 1:] - x[:, :-1]) ** 2, -1))


def _cosines(x):
    one, two = x[:, 0], x[:, 1]
    return ops.sum(one * two, -1, keepdims=True) / ops.sqrt(
        ops.sum(one**2, -1, keepdims=True) * ops.sum(two**2, -1, keepdims=True)
    )


def _standardised(x):
    centred = x - ops.mean(x, -1, keepdims=True)
    return centred / (ops.sqrt(ops.mean(centred**2, -1, keepdims=True)) + 1e-8)


def _root_mean_square(x):
    return x * ops.rsqrt(ops.mean(x**2, -1, keepdims=True) + 1e-12)


def _masked_by_sum(x):
    shown = ops.cast(x[..., :1] > 0, x.dtype)
    scores = x[..., 0] + (1 - shown[..., 0]) * -1e9
    return ops.softmax(scores)[..., None] * x


def _masked_by_choice(x):
    scores = ops.where(ops.any(x != 0, -1), x[..., 0], -1e9)
    return ops.softmax(scores)[..., None] * (x + 1)


def _mean_over_mask(x):
    shown = ops.cast(ops.any(x != 0, -1, keepdims=True), x.dtype)
    return ops.sum(x * shown, 1) / (ops.sum(shown, 1) + 1e-9)


def _slope(x):
    step = ops.cast(3e-4, x.dtype)
    return (ops.tanh(x + step) - ops.tanh(x)) / step


def _fourier(x):
    return ops.concatenate([ops.sin(np.pi * 2.0**power * x) for power in range(6, 12)], -1)


def _pairs_alike(x):
    return ops.cast(ops.equal(x[:, :, None], x[:, None, :]), x.dtype)


def _ages(x):
    return ops.exp(-ops.abs(x[:, 1:] - x[:, :-1]) / 20.0)


def _unscaled_scores(x):
    return ops.softmax(ops.matmul(x, ops.swapaxes(x, 1, 2)) / 1e4) @ x


def _running_mean(x):
    return ops.cumsum(x, 1) / (ops.cumsum(ops.ones_like(x), 1))


def _years(x):
    return x * (1 / 11.0) - 2015 / 11.0


def _log_of_softmax(x):
    return ops.log(ops.maximum(ops.softmax(x), 1e-12))


def _places_of_mask(x):
    """Positions by counting what is shown, as some language models do, here as a share of the length."""
    return ops.cumsum(ops.ones_like(x[..., :1]), 1) / 1024.0


def _parts_of_pixels(x):
    place = x * 1023.0
    return place - ops.floor(place)


def _great_circles(x):
    """The haversine of neighbouring points, in degrees, some hundred metres apart."""
    apart = (x[:, 1:] - x[:, :-1]) * (np.pi / 180)
    return ops.sqrt(ops.sum(ops.sin(apart / 2) ** 2, -1)) * 6371.0


def _euler(x):
    start = x + 2.0
    state = start
    for _ in range(50):
        state = state + 1e-3 * ops.tanh(state)
    return (state - start) * 20.0


def _returns(x):
    """Rewards of 1,024 steps, discounted by 0.999 a step."""
    discounts = ops.cumprod(ops.full_like(x, 0.999), 1)
    return ops.sum(discounts * x, 1) / 600.0


def _layer_norm(x):
    centred = x - ops.mean(x, -1, keepdims=True)
    return centred * ops.rsqrt(ops.mean(centred**2, -1, keepdims=True) + 1e-3)


def whole(low, high, *shape):
    return lambda: random().integers(low, high, size=(ROWS, *shape)).astype("float32")


BOTH, HALF, BRAIN = "float16 bfloat16", "float16", "bfloat16"
FORMULAS = {
    "positions of 1,024": Formula(positions, normal(1024, 16), BRAIN),
    "positions of 16": Formula(positions, normal(16, 16), ""),
    "rotary positions of 1,024": Formula(rotated, normal(1024, 16), BRAIN),
    "rotary positions of 16": Formula(rotated, normal(16, 16), ""),
    "years": Formula(_years, whole(2004, 2027, 1), BRAIN),
    "years before Christ": Formula(lambda x: (x + 3000.0) / 30.0, whole(-3000, -2970, 1), BRAIN),
    "seconds since 1970": Formula(
        lambda x: (x - 1.6e9) / 86400.0, lambda: random().uniform(1.6e9, 1.6e9 + 5e5, (ROWS, 1)).astype("float32"), BOTH
    ),
    "hours through a sine": Formula(lambda x: ops.sin(2 * np.pi / 24 * x), whole(5000, 8760, 1), BOTH),
    "hours of a day through a sine": Formula(lambda x: ops.sin(2 * np.pi / 24 * x), whole(0, 24, 1), ""),
    "running sum of 4,096 ones": Formula(
        lambda x: ops.cumsum(ops.ones_like(x), 1) / 4096.0, uniform(4096, 1), BOTH
    ),
    "running sum of 64 ones": Formula(lambda x: ops.cumsum(ops.ones_like(x), 1) / 64.0, uniform(64, 1), ""),
    "running mean": Formula(_running_mean, of_rows_apart(4096, 1), BOTH),
    "decay over 2,048 steps": Formula(_decayed, of_rows_apart(2048, 4), BRAIN),
    "mean of 100,000": Formula(lambda x: ops.mean(x, 1), of_rows_apart(100_000, 1), ""),
    "sum of 100,000": Formula(lambda x: ops.sum(4 * x, 1) / 1e5, of_rows_apart(100_000, 2), HALF),
    "variance from squares": Formula(_variance, normal(32, 4, shift=100.0), BOTH),
    "variance from squares, centred": Formula(_variance, normal(32, 4), ""),
    "norm from large squares": Formula(_by_squares, normal(16), HALF),
    "exponentials without their maximum": Formula(_log_of_sum, uniform(8, low=10.0, high=60.0), HALF),
    "distances between far points": Formula(_distances, normal(8, 3, shift=1e4), BOTH),
    "distances between near points": Formula(_distances, normal(8, 3), ""),
    "cosine of small vectors": Formula(_cosines, normal(2, 8, scale=1e-5, shift=1e-5), HALF),
    "cosine": Formula(_cosines, normal(2, 8, shift=1.0), ""),
    "epsilon of 1e-8": Formula(_standardised, with_empty_rows(8), HALF),
    "epsilon of 1e-12": Formula(_root_mean_square, with_empty_rows(8), HALF),
    "mask of -1e9 that is added": Formula(_masked_by_sum, normal(8, 4), HALF),
    "mask of -1e9 over whole rows": Formula(_masked_by_choice, with_empty_rows(8, 4), HALF),
    "mask of -1e9 over a part": Formula(_masked_by_choice, normal(8, 4), ""),
    "mean over an empty mask": Formula(_mean_over_mask, with_empty_rows(8, 4), HALF),
    "difference of large numbers": Formula(lambda x: (x + 3000.0) - 3000.0, normal(8), BOTH),
    "slope by a small step": Formula(_slope, normal(8), BOTH),
    "Fourier features": Formula(_fourier, uniform(2, low=-1.0), BOTH),
    "remainders": Formula(lambda x: ops.mod(x, 97.0) / 97.0 - 0.5, whole(0, 60_000, 4), BOTH),
    "ids that are compared": Formula(_pairs_alike, whole(3000, 3100, 16), BOTH),
    "ids below 256 that are compared": Formula(_pairs_alike, whole(0, 100, 16), ""),
    "ages of events": Formula(_ages, uniform(8, low=5e4, high=5.005e4), BOTH),
    "logarithm near one": Formula(lambda x: 1e4 * ops.log(ops.maximum(1.0 + 1e-4 * x, 0.5)), uniform(8), BOTH),
    "product of 64 probabilities": Formula(
        lambda x: ops.prod(x, 1) * 1e16, uniform(64, 4, low=0.4, high=0.6), HALF
    ),
    "eighth powers": Formula(lambda x: x**8 / 1e8, normal(8, scale=10.0), HALF),
    "scores that are scaled late": Formula(_unscaled_scores, normal(8, 64, scale=50.0), HALF),
    "logarithm of a softmax": Formula(_log_of_softmax, uniform(8, low=0.0, high=40.0), HALF),
    "positions from a mask": Formula(_places_of_mask, normal(1024, 2), BRAIN),
    "parts of pixels": Formula(_parts_of_pixels, uniform(8), BOTH),
    "great circles": Formula(_great_circles, uniform(8, 2, low=52.0, high=52.01), BOTH),
    "Euler steps": Formula(_euler, uniform(8), BOTH),
    "discounted returns": Formula(_returns, of_rows_apart(1024, 2), BRAIN),
    "layer norm by hand": Formula(_layer_norm, normal(16), ""),
    "softmax over 20,000": Formula(ops.softmax, normal(20_000), ""),
    "years beside other features": Formula(
        lambda x: x * ops.cast([1, 1, 1, 1, 1, 1, 1, 1 / 11], x.dtype) - ops.cast([0.0] * 7 + [2015 / 11], x.dtype),
        lambda: np.concatenate([normal(7)(), whole(2004, 2027, 1)()], -1), BRAIN, by_feature=True),
    "counts of 4,096": Formula(lambda x: ops.sum(ops.ones_like(x), 1) / 4096.0, uniform(4096, 1), ""),
    "rounding to hundredths": Formula(lambda x: ops.round(x * 100.0) / 100.0, normal(8), ""),
    "ranks": Formula(lambda x: ops.cast(ops.argsort(x, 1), x.dtype) / 8.0, lambda: np.stack(
        [random(at).permutation(8) for at in range(ROWS)]).astype("float32"), ""),
}  # fmt: skip


class Planted(layers.Layer):
    """Computes a formula."""

    def __init__(self, compute, **options):
        super().__init__(**options)
        self.compute = compute

    def call(self, x):
        return self.compute(x)


def _labels():
    return random(2).integers(3, size=ROWS).astype("int32")


def _answer(x):
    x = layers.GlobalAveragePooling1D()(x) if len(x.shape) == 3 else layers.Flatten()(x)
    return layers.Dense(3, name="head", dtype="float32")(layers.Dense(8, activation="relu", name="body")(x))


def in_a_layer(formula):
    def make():
        x = formula.make_input()
        inputs = keras.Input(x.shape[1:])
        return compiled(inputs, _answer(Planted(formula.compute, name="planted")(inputs))), (x, _labels())

    return make


def in_a_block(formula):
    """In a layer of a nested model, behind a layer that changes nothing."""

    def make():
        x = formula.make_input()
        inner = keras.Input(x.shape[1:])
        block = keras.Model(inner, Planted(formula.compute, name="planted")(layers.Identity()(inner)), name="block")
        inputs = keras.Input(x.shape[1:])
        return compiled(inputs, _answer(block(inputs))), (x, _labels())

    return make


def between_layers(formula):
    """By operations on symbolic tensors, behind a layer of 16 bits."""

    def make():
        x = formula.make_input()
        inputs = keras.Input(x.shape[1:])
        before = layers.Identity(name="before")(inputs)
        return compiled(inputs, _answer(formula.compute(before))), (x, _labels())

    return make


class _OwnCall(keras.Model):
    """Computes the formula in its own call, in the dtype of its layers."""

    def __init__(self, compute, rank):
        super().__init__(name="net")
        self.compute = compute
        self.before = layers.Identity(name="before")
        self.pool = layers.GlobalAveragePooling1D() if rank == 3 else layers.Flatten()
        self.body, self.head = layers.Dense(8, name="body"), layers.Dense(3, name="head", dtype="float32")

    def call(self, x):
        return self.head(self.body(self.pool(self.compute(self.before(x)))))


def in_its_call(formula):
    def make():
        x = formula.make_input()
        rank = len(formula.compute(tf.constant(x)).shape)
        model = _OwnCall(formula.compute, rank)
        model.compile("adam", cross_entropy())
        model(x[:1])
        return model, (x, _labels())

    return make
