"""Two replicas on two logical CPU devices, whose result should be one device's; and accumulated gradients."""

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case

SCALE = 2.0**15


def two_replicas(with_tfopt):
    """A strategy over two logical devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tfopt.distribute.strategy("auto") if with_tfopt else tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    assert strategy.num_replicas_in_sync == 2
    return strategy


def linear(strategy, optimizer, *, inputs=3, dtype="float32", kind=keras.Sequential, loss="mse"):
    """A linear model, all weights 0."""
    with strategy.scope():
        model = kind([keras.Input((inputs,)), keras.layers.Dense(1, kernel_initializer="zeros", dtype=dtype)])
        model.compile(optimizer(), loss, jit_compile=False)
    return model


def after_an_overflow(with_tfopt):
    """A float16 model after a step in which the second replica's half of the batch overflowed."""
    strategy = two_replicas(with_tfopt)
    sgd = keras.optimizers.SGD
    scaled = lambda: keras.optimizers.LossScaleOptimizer(sgd(0.01), initial_scale=SCALE)  # noqa: E731
    model = linear(strategy, scaled, dtype="mixed_float16")
    targets = np.repeat([0.1, 1e4], 4)[:, None].astype("float32")
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 3), "float32"), targets)), verbose=0)
    return model


def not_finite(with_tfopt, folder):
    """Weights that are not finite after the overflow."""
    return int(sum(np.sum(~np.isfinite(weight)) for weight in after_an_overflow(with_tfopt).get_weights()))


def scale_after(with_tfopt, folder):
    """The loss scale after the overflow."""
    return float(after_an_overflow(with_tfopt).optimizer.dynamic_scale.numpy())


EXAMPLES, BATCH = 81, 32


def regression():
    """Inputs and targets of an exact linear function."""
    inputs = np.random.default_rng(0).normal(size=(EXAMPLES, 3))
    return inputs, inputs @ [[1.0], [-2.0], [0.5]] + 0.3


def by_numpy():
    """The kernel and the bias after an epoch of gradient descent."""
    inputs, targets = regression()
    kernel, bias = np.zeros((3, 1)), np.zeros(1)
    for start in range(0, EXAMPLES, BATCH):
        x, y = inputs[start : start + BATCH], targets[start : start + BATCH]
        error = 2 * (x @ kernel + bias - y) / len(x)
        kernel, bias = kernel - 0.1 * x.T @ error, bias - 0.1 * error.sum(0)
    return kernel, bias


def uneven_batches(with_tfopt, folder):
    """The largest error of a weight after an epoch whose last batch of 17 splits into 9 and 8."""
    model = linear(two_replicas(with_tfopt), lambda: keras.optimizers.SGD(0.1))
    examples = [part.astype("float32") for part in regression()]
    model.fit(tf.data.Dataset.from_tensor_slices(tuple(examples)).batch(BATCH), verbose=0)
    return max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), by_numpy(), strict=True))


def clipped(with_tfopt, folder):
    """The norm of a step of learning rate 1 whose gradient is far above the clip of 1."""
    model = linear(two_replicas(with_tfopt), lambda: keras.optimizers.SGD(1.0, global_clipnorm=1.0))
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 3), "float32"), np.full((8, 1), 100.0))), verbose=0)
    return float(np.sqrt(sum(np.sum(weight**2) for weight in model.get_weights())))


class Inverse(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rates 1, 1/2, 1/3, …"""

    def __call__(self, step):
        return 1.0 / (tf.cast(step, tf.float32) + 1.0)


def accumulating(with_tfopt, optimizer):
    """A model of one weight, from 0, whose gradient is always -1: the weight is the sum of the learning rates."""
    if with_tfopt:
        tfopt.repairs.install("accumulation")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(optimizer, lambda y, y_pred: -y_pred, jit_compile=False)
    return model


def train(model, batches, epochs=1):
    """Trains on a number of batches that hold a one; returns the weight."""
    model.fit(np.ones((batches, 1)), np.ones((batches, 1)), batch_size=1, epochs=epochs, verbose=0)
    return float(model.get_weights()[0][0, 0])


def second_rate(with_tfopt, folder):
    """The learning rate of the second update, each of four batches."""
    model = accumulating(with_tfopt, keras.optimizers.SGD(Inverse(), gradient_accumulation_steps=4))
    first = train(model, 4)
    return train(model, 4) - first


def updates(with_tfopt, folder):
    """Updates that two epochs of five batches make."""
    return train(accumulating(with_tfopt, keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)), 5, epochs=2)


class Penalised(keras.Sequential):
    """Adds a penalty of its own to Keras' loss."""

    def compute_loss(self, *args, **options):
        return super().compute_loss(*args, **options) + keras.ops.sum(self.weights[0])


class PenaltyInTraining(keras.layers.Layer):
    """Adds a sum over the examples to the loss while it trains."""

    def call(self, inputs, training=False):
        if training:
            self.add_loss(keras.ops.sum(inputs))
        return inputs


def after_a_step(strategy, *more, kind=keras.Sequential):
    """The weight of a model after a step of learning rate 1 on 8 ones, whose own loss is always 0."""
    with strategy.scope():
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = kind([keras.Input((1,)), dense, *more])
        model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: 0.0 * y_pred, jit_compile=False)
    model.fit(tf.data.Dataset.from_tensors((np.ones((8, 1)), np.ones((8, 1)))), verbose=0)
    return float(model.get_weights()[0][0, 0])


def penalty_by_hand(with_tfopt, folder):
    """The weight after a step with a penalty whose gradient is 1."""
    return after_a_step(two_replicas(with_tfopt), kind=Penalised)


def sum_in_training(with_tfopt, folder):
    """The weight after a step with a sum whose gradient is 8."""
    return after_a_step(two_replicas(with_tfopt), PenaltyInTraining())


def masked_mean(with_tfopt, folder):
    """The moving mean of a batch whose first half, for the first replica, is ones, and whose second is threes."""
    with two_replicas(with_tfopt).scope():
        norm = keras.layers.BatchNormalization(synchronized=True, momentum=0.0)
        model = keras.Sequential([keras.Input((2, 1)), keras.layers.Masking(), norm])
        model.compile("sgd", "mse", jit_compile=False)
    inputs = np.repeat([1.0, 3.0], 4)[:, None, None] * np.ones((8, 2, 1))
    model.fit(tf.data.Dataset.from_tensors((inputs, inputs)), verbose=0)
    return float(norm.moving_mean.numpy()[0])


CASES = (
    Case("D1", "weights that are not finite after an overflow in replica 2", 0, not_finite),
    Case("D1", "loss scale after it, from 32,768", SCALE / 2, scale_after),
    Case("D2", "largest error of a weight after 81 examples in batches of 32", 0, uneven_batches, 1e-6),
    Case("D3", "norm of the update at `global_clipnorm=1`", 1, clipped, 1e-4),
    Case("D6", "rate of update 2, scheduled as 1/update, with 4 batches an update", 0.5, second_rate, 1e-6),
    Case("D6", "updates by two epochs of 5 batches, with 4 an update", 4, updates, 1e-6),
    Case("D24", "weight after a step of 1 along a penalty added to `compute_loss`", -1, penalty_by_hand, 1e-6),
    Case("D25", "weight after a step of 1 along a sum over 8 examples", -8, sum_in_training, 1e-6),
    Case("D26", "moving mean of a batch whose halves are ones and threes", 2, masked_mean, 1e-4),
)
