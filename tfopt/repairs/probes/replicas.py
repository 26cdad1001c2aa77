"""Trainings on two replicas, whose result should be one device's. They want two logical devices."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.probe_process import outcomes
from tfopt.repairs.probes.one_device import numbers

SCALE = 2.0**15
EXAMPLES, BATCH = 81, 32


@functools.cache  # two of them would share the keys of their collective operations
def two_replicas() -> tf.distribute.Strategy:
    """A strategy over two logical devices."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def fitted() -> list[float]:
    """Weights, metrics and losses of a plain training whose batches divide evenly."""
    keras.utils.set_random_seed(1)
    with two_replicas().scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return numbers(model)


def uneven_first_batch() -> str:
    """Whether `fit` takes data whose first batch splits unevenly."""
    model = linear(two_replicas(), lambda: keras.optimizers.SGD(0.1))
    try:
        model.fit(tf.data.Dataset.from_tensors((np.ones((5, 3), "float32"), np.ones((5, 1)))), verbose=0)
    except Exception:  # noqa: BLE001  whatever Keras raises
        return "fails"
    return "trains"


def linear(strategy: Any, optimizer: Any, *, dtype: str = "float32") -> Any:
    """A linear model of 3 inputs, all weights 0."""
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros", dtype=dtype)
        model = keras.Sequential([keras.Input((3,)), dense])
        model.compile(optimizer(), "mse", jit_compile=False)
    return model


def _after_an_overflow(strategy: Any) -> Any:
    """A float16 model after a step in which the second replica's half of the batch overflowed."""
    sgd = keras.optimizers.SGD(0.01)
    model = linear(
        strategy, lambda: keras.optimizers.LossScaleOptimizer(sgd, initial_scale=SCALE), dtype="mixed_float16"
    )
    targets = np.repeat([0.1, 1e4], 4)[:, None].astype("float32")
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 3), "float32"), targets)), verbose=0)
    return model


def overflow() -> list[float]:
    """Weights that are not finite after an overflow in the second replica, and the loss scale."""
    return [not_finite(), scale_after()]


def not_finite(strategy: Any = None) -> int:
    """Weights that are not finite after an overflow in the second replica."""
    model = _after_an_overflow(strategy or two_replicas())
    return int(sum(np.sum(~np.isfinite(weight)) for weight in model.get_weights()))


def scale_after(strategy: Any = None) -> float:
    """The loss scale after it."""
    return float(_after_an_overflow(strategy or two_replicas()).optimizer.dynamic_scale.numpy())


def _regression() -> tuple[Any, Any]:
    """Inputs and targets of an exact linear function."""
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 3))
    return inputs, inputs @ [[1.0], [-2.0], [0.5]] + 0.3


def _by_numpy() -> tuple[Any, Any]:
    """The kernel and the bias after an epoch of gradient descent."""
    inputs, targets = _regression()
    kernel, bias = np.zeros((3, 1)), np.zeros(1)
    for start in range(0, EXAMPLES, BATCH):
        x, y = inputs[start : start + BATCH], targets[start : start + BATCH]
        error = 2 * (x @ kernel + bias - y) / len(x)
        kernel, bias = kernel - 0.1 * x.T @ error, bias - 0.1 * error.sum(0)
    return kernel, bias


def uneven_batches(strategy: Any = None) -> float:
    """The largest error of a weight after an epoch whose last batch of 17 splits into 9 and 8."""
    model = linear(strategy or two_replicas(), lambda: keras.optimizers.SGD(0.1))
    examples = [part.astype("float32") for part in _regression()]
    model.fit(tf.data.Dataset.from_tensor_slices(tuple(examples)).batch(BATCH), verbose=0)
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), _by_numpy(), strict=True))


def clipped(strategy: Any = None) -> float:
    """The norm of a step of learning rate 1 whose gradient is far above the clip of 1."""
    model = linear(strategy or two_replicas(), lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 3), "float32"), np.full((8, 1), 100.0))), verbose=0)
    return float(np.sqrt(sum(np.sum(weight**2) for weight in model.get_weights())))


class Penalised(keras.Sequential):
    """Adds a penalty of its own to Keras' loss."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        """Returns the sum."""
        return super().compute_loss(*args, **options) + keras.ops.sum(self.weights[0])


class PenaltyInTraining(keras.layers.Layer):
    """Adds a sum over the examples to the loss while it trains."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        """Returns its inputs."""
        if training:
            self.add_loss(keras.ops.sum(inputs))
        return inputs


def _after_a_step(strategy: Any, *more: Any, kind: Any = keras.Sequential) -> float:
    """The weight of a model after a step of learning rate 1 on 8 ones, whose own loss is always 0."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = kind([keras.Input((1,)), dense, *more])
        model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: 0.0 * y_pred, jit_compile=False)
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 1)), np.ones((8, 1)))), verbose=0)
    return float(model.get_weights()[0][0, 0])


def penalty_by_hand(strategy: Any = None) -> float:
    """The weight after a step with a penalty whose gradient is 1."""
    return _after_a_step(strategy or two_replicas(), kind=Penalised)


def sum_in_training(strategy: Any = None) -> float:
    """The weight after a step with a sum whose gradient is 8."""
    return _after_a_step(strategy or two_replicas(), PenaltyInTraining())


def masked_mean(strategy: Any = None) -> float:
    """The moving mean of a batch whose first half, for the first replica, is ones, and whose second is threes."""
    with (strategy or two_replicas()).scope():
        norm = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
        model = keras.Sequential([keras.Input((2, 1)), keras.layers.Masking(), norm])
        model.compile("sgd", "mse", jit_compile=False)
    inputs = np.repeat([1.0, 3.0], 4)[:, None, None] * np.ones((8, 2, 1))
    model.fit(tf.data.Dataset.from_tensors((inputs, inputs)), verbose=0)
    return float(norm.moving_mean.numpy()[0])


def uneven() -> list[float]:
    """The error of a weight after uneven batches, and a moving mean behind a mask."""
    return [uneven_batches(), masked_mean()]


def own_terms() -> list[Any]:
    """The weight after a step with a penalty by hand, and with a sum in a layer."""
    return outcomes(penalty_by_hand, sum_in_training)


def same_draws() -> float:
    """The share of numbers that two replicas draw alike."""
    strategy = two_replicas()
    with strategy.scope():
        noise = keras.layers.GaussianNoise(1.0, seed=1)
    draws = strategy.run(tf.function(lambda: noise(tf.zeros(100), training=True)))
    one, other = strategy.experimental_local_results(draws)
    return float(np.mean(one.numpy() == other.numpy()))


def executions() -> list[Any]:
    """Whether `fit` takes several steps in an execution, and how many predictions it makes of a batch of 8."""
    with two_replicas().scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=2, jit_compile=False)
    try:
        model.fit(np.ones((8, 1)), np.ones((8, 1)), batch_size=2, verbose=0)
        trains = "trains"
    except Exception:  # noqa: BLE001  whatever Keras raises
        trains = "fails"
    return [trains, len(model.predict_on_batch(np.ones((8, 1))))]


def overwritten() -> list[float]:
    """The share of labels that `fit` overwrites in an array of which a generator or a PyDataset yields slices."""
    inputs = np.ones((256, 16), "float32")

    def batch(labels: Any, index: int) -> tuple[Any, Any]:
        return inputs[32 * index : 32 * index + 32], labels[32 * index : 32 * index + 32]

    class Slices(keras.utils.PyDataset):
        def __init__(self, labels: Any) -> None:
            super().__init__()
            self.labels = labels

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            return batch(self.labels, index)

    def changed(source: Any) -> float:
        raw = np.zeros(256 * 4 + 64, np.uint8)
        start = -raw.ctypes.data % 64
        labels = raw[start : start + 256 * 4].view(np.float32).reshape(256, 1)  # such memory tf.data uses as it is
        labels[:] = 0.5
        with two_replicas().scope():
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse", jit_compile=False)
        model.fit(source(labels), verbose=0)
        return float(np.mean(labels != 0.5))

    return [changed(lambda labels: (batch(labels, index) for index in range(8))), changed(Slices)]
