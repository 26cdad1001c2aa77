"""Trainings of published models, and how one is compared with another."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt import repairs

EXAMPLES, BATCH, EPOCHS = 16, 4, 2
ROUNDINGS = 32
"""How many times as far apart rounding may bring two float32 trainings as one rounding of each initial weight does, or
one rounding of the value that is compared."""
EPSILONS = {"float32": 2**-23, "float16": 2**-10, "bfloat16": 2**-7}
_PERTURBED = 2
"""Trainings from rounded weights."""


@dataclass(frozen=True)
class Net:
    """A model that is trained with and without each tool."""

    name: str
    make: Callable[[], tuple[keras.Model, Any]]
    """Returns a compiled model, and all its data as `fit` takes them: x, or (x, y[, sample_weight])."""
    needs: str | None = None
    """A package besides tfopt's own."""


class Trained(NamedTuple):
    """What a training has changed."""

    variables: list[np.ndarray]
    """Of the model and of its optimizers."""
    metrics: list[np.ndarray]
    history: dict[str, list[float]]


class Training:
    """One net in this process: built and trained from the same seed as often as it takes."""

    def __init__(self, net: Net):
        self.net = net
        self._rounded: dict[str, list[Trained]] = {}

    def build(self) -> keras.Model:
        """The model as it begins, with nothing of an earlier tool left."""
        repairs.remove()
        keras.config.set_dtype_policy("float32")
        keras.utils.clear_session()
        keras.utils.set_random_seed(1)
        model, data = self.net.make()
        self.data = tf.data.Dataset.from_tensor_slices(data).batch(BATCH, drop_remainder=True)
        return model

    @cached_property
    def batch(self) -> Any:
        """The first batch, as tensors."""
        return next(iter(self.data))

    def fit(self, model: keras.Model, *callbacks: keras.callbacks.Callback) -> Trained:
        """Trains, and returns all that there is then."""
        keras.utils.set_random_seed(2)
        history = model.fit(self.data, epochs=EPOCHS, verbose=0, shuffle=False, callbacks=list(callbacks)).history
        metrics = [variable.numpy() for variable in model.metrics_variables]
        self.names = [variable.path for variable in variables(model)]
        after = [variable.numpy() for variable in variables(model)]
        return Trained(after, metrics, {name: list(map(float, each)) for name, each in history.items()})

    @cached_property
    def stock(self) -> Trained:
        """The training without tfopt."""
        return self.fit(self.build())

    def rounded(self, dtype: str = "float32") -> list[Trained]:
        """The same with each initial weight one rounding up or down: how far apart rounding brings two trainings."""
        if dtype not in self._rounded:
            self._rounded[dtype] = [self._fit_rounded(dtype, np.random.default_rng(seed)) for seed in range(_PERTURBED)]
        return self._rounded[dtype]

    def _fit_rounded(self, dtype: str, random: np.random.Generator) -> Trained:
        model = self.build()
        for weight in model.trainable_variables:
            signs = random.choice(np.float32([-1, 1]), weight.shape)
            weight.assign(weight.numpy() * (1 + signs * EPSILONS[dtype]))
        return self.fit(model)

    def same_bits(self, found: Trained) -> str | None:
        """What differs from the training without tfopt; None if nothing does, bit for bit."""
        for name, values in self.stock.history.items():
            if found.history[name] != values:
                return f"{name} is {found.history[name]}, not {values}"
        return unequal(found.variables, self.stock.variables) or unequal(found.metrics, self.stock.metrics)

    def same_to_rounding(self, found: Trained) -> str | None:
        """What differs from the training without tfopt by more than rounding in float32; None if nothing does."""
        trainings = (found, self.stock, *self.rounded())
        compared = {f"{name} ": [np.array(each.history[name]) for each in trainings] for name in self._losses}
        for place, name in enumerate(self.names):
            compared[name] = [each.variables[place] for each in trainings]
        for name, (value, stock, *rounded) in compared.items():
            if not np.issubdtype(stock.dtype, np.floating):
                if not np.array_equal(value, stock):
                    return f"{name} is {value}, not {stock}"
                continue
            allowed = ROUNDINGS * max(EPSILONS["float32"] * norm(stock), *(norm(one - stock) for one in rounded))
            if not norm(value - stock) <= allowed:
                return f"{name} is {norm(value - stock):.2g} away, of {norm(stock):.2g}; rounding: {allowed:.2g}"
        return None

    def same_losses(self, found: Trained, dtype: str) -> str | None:
        """Which loss differs by more than a training in 16 bits may: 32 roundings, as `precision.check` allows for one
        step, or four times as much as weights rounded to that dtype make in float32. None if no loss does."""
        for name in self._losses:
            value, stock, *rounded = (
                np.array(each.history[name]) for each in (found, self.stock, *self.rounded(dtype))
            )
            allowed = np.maximum(
                32 * EPSILONS[dtype] * abs(stock), 4 * np.max([abs(one - stock) for one in rounded], 0)
            )
            if not np.all(abs(value - stock) <= allowed):
                return f"{name} is {value}, in float32 {stock}, by rounding {allowed} away"
        return None

    @property
    def _losses(self) -> list[str]:
        return [name for name in self.stock.history if "loss" in name]


def norm(value: np.ndarray) -> float:
    """Of all elements."""
    return float(np.linalg.norm(np.asarray(value, "float64").ravel()))


def variables(model: keras.Model) -> list[keras.Variable]:
    """The model's variables and those of its optimizers, of which a GAN has several."""
    held = [one for one in vars(model).values() if isinstance(one, keras.optimizers.Optimizer)]
    return [*model.variables, *(part for one in held for part in one.variables)]


def weights(model: keras.Model) -> list[np.ndarray]:
    """The model's variables, without its optimizers'."""
    return [variable.numpy() for variable in model.variables]


def unequal(found: list[np.ndarray], expected: list[np.ndarray]) -> str | None:
    """Which values differ in a bit; None if none do."""
    if len(found) != len(expected):
        return f"{len(found)} variables, not {len(expected)}"
    places = [at for at, pair in enumerate(zip(found, expected, strict=True)) if pair[0].tobytes() != pair[1].tobytes()]
    return f"variables {places} of {len(found)}" if places else None
