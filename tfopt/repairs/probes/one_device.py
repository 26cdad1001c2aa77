"""Trainings on one device."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.probe_process import outcomes

TINY = 1e-8  # a gradient that float16 rounds to 0
_IDS = 5_000
_ELEMENTS = 10_000


def one_weight(optimizer: Any, loss: Any = None, policy: str | None = None, kind: Any = keras.Sequential) -> Any:
    """A model of one weight, from 0. By default the gradient of its loss is -1, so that a step adds the rate."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=policy)
    model = kind([keras.Input((1,)), dense])
    model.compile(optimizer, loss or _minus, jit_compile=False)
    return model


def _minus(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    return -y_pred


def trained(model: Any, batches: int = 1, epochs: int = 1) -> float:
    """Trains on a number of batches that hold a one; returns the weight."""
    ones = np.ones((batches, 1), "float32")
    model.fit(ones, ones, batch_size=1, epochs=epochs, verbose=0)
    return float(model.get_weights()[0][0, 0])


def fitted() -> list[float]:
    """Weights, metrics and losses of a plain training, of a net with dropout and batch normalization."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((4,)), layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return numbers(model)


def numbers(model: Any) -> list[float]:
    """What two epochs of 5 batches of 8 examples, and a validation, leave of a model that takes 4 numbers."""
    inputs = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :2])).batch(8)
    history = model.fit(data, validation_data=data, epochs=2, shuffle=False, verbose=0).history
    logs = [value for name in sorted(history) for value in history[name]]
    weights = [float(value) for weight in model.get_weights() for value in np.ravel(weight)]
    evaluated = model.evaluate(data, return_dict=True, verbose=0)
    predicted = np.ravel(model.predict(data, verbose=0)).tolist()
    steps = model.optimizer.iterations.numpy()
    return [float(value) for value in (*logs, *weights, *evaluated.values(), *predicted, steps)]


def tiny_loss(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Its gradient is -1e-8 for each prediction."""
    return -TINY * tf.cast(y_pred, tf.float32)


def float16_layer() -> float:
    """How far a step of 1 moves the weight of a float16 layer in a float32 model."""
    return trained(one_weight(keras.optimizers.SGD(1 / TINY), tiny_loss, "mixed_float16"))


def _loaded_steps() -> float:
    """Steps of the optimizer of a float16 model that was trained for 8, saved, and loaded under another policy."""
    keras.config.set_dtype_policy("mixed_float16")
    model: Any = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.fit(np.full((8, 1), 0.1), np.zeros((8, 1)), batch_size=1, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        keras.config.set_dtype_policy("float32")
        loaded = keras.saving.load_model(Path(folder) / "model.keras")
    return float(loaded.optimizer.iterations.numpy())


def loss_scaling() -> list[float]:
    """How far a step of 1 moves a float16 layer's weight, and the steps that a loaded model knows of 8."""
    return outcomes(float16_layer, _loaded_steps)


class Forgetful(keras.Sequential):
    """A train_step that does not scale its loss."""

    def train_step(self, data: Any) -> Any:
        """Takes a step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def unscaled_loss() -> list[Any]:
    """What `forgotten_scale` does."""
    return outcomes(forgotten_scale)


def forgotten_scale() -> float:
    """How far a step without scale_loss moves a weight that should move by 1."""
    keras.config.set_dtype_policy("mixed_float16")
    return trained(one_weight(keras.optimizers.SGD(0.5), "mse", kind=Forgetful))  # the gradient of (w - 1)² is -2


def cleared_policy() -> str:
    """The global policy, of mixed_bfloat16, after clear_session."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.utils.clear_session()
    return str(keras.config.dtype_policy().name)


def wrong_ids() -> float:
    """The share of ids whose embedding is another id's, in a Sequential without Input, in bfloat16."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    # A row holds its number, in digits that bfloat16 holds.
    table = np.stack([np.arange(_IDS) // 100, np.arange(_IDS) % 100], axis=1)
    model = keras.Sequential([keras.layers.Embedding(_IDS, 2)])
    model.compile("sgd", "mse", jit_compile=False)
    model.build((None, 1))
    model.set_weights([table])
    found = model.predict(np.arange(_IDS)[:, None], verbose=0)[:, 0]
    return float(np.mean(np.any(found != table, axis=1)))


class Inverse(keras.optimizers.schedules.LearningRateSchedule):
    """Learning rates 1, 1/2, 1/3, …"""

    def __call__(self, step: Any) -> Any:
        """Returns the rate of a step."""
        return 1.0 / (tf.cast(step, tf.float32) + 1.0)


def second_rate() -> float:
    """The learning rate of the second update, scheduled as 1/update, each of four batches."""
    model = one_weight(keras.optimizers.SGD(Inverse(), gradient_accumulation_steps=4))
    first = trained(model, 4)
    return trained(model, 4) - first


def updates() -> float:
    """Updates that two epochs of five batches make, with four an update."""
    return trained(one_weight(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)), 5, epochs=2)


def accumulated() -> list[float]:
    """The rate of the second update, and the number of updates."""
    return [second_rate(), updates()]


def _outputs_and_gradient(function: Any, x: tf.Tensor) -> Any:
    """What a function gives in a graph, and the gradient of its sum."""

    @tf.function(autograph=False)
    def both(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = function(x)
        return outputs, tape.gradient(outputs, x)

    return both(x)


def other_mask() -> float:
    """The share of elements whose gradient, recomputed, is not that of what dropout did to them."""
    dropout = keras.layers.Dropout(0.5, seed=1)
    dropped = keras.remat(lambda x: dropout(x, training=True))
    # Of ones, the outputs are the factors by which dropout multiplied: the gradient of their sum.
    outputs, gradient = _outputs_and_gradient(dropped, tf.ones(_ELEMENTS))
    return float(np.mean(outputs.numpy() != gradient.numpy()))


def averaged_twice() -> float:
    """A moving mean of momentum 0.9 after a step, recomputed, on a batch whose mean is 1."""
    norm = keras.layers.BatchNormalization(momentum=0.9)
    norm.build((None, 1))
    _outputs_and_gradient(keras.remat(lambda x: norm(x, training=True)), tf.constant([[0.0], [2.0]]))
    return float(norm.moving_mean.numpy()[0])


def recomputed() -> list[Any]:
    """Gradients from another mask than dropout's, and a mean that is averaged twice."""
    return outcomes(other_mask, averaged_twice)


class Hungry(keras.layers.Layer):
    """Needs as many numbers in memory as its inputs say."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns its inputs."""
        size = tf.cast(tf.reduce_max(x), tf.int64)
        return x + 0 * tf.reduce_sum(tf.random.uniform([size])[:1])


def failed_steps() -> int:
    """Steps that the optimizer has counted after a good one and one that ran out of memory."""
    model = keras.Sequential([keras.Input((1,)), Hungry(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    examples = tf.data.Dataset.from_tensor_slices(([[1.0], [float(2**44)]], [[0.0], [0.0]])).batch(1)
    try:
        model.fit(examples, verbose=0)
    except tf.errors.ResourceExhaustedError:
        return int(model.optimizer.iterations.numpy())
    raise AssertionError("There was enough memory.")


def unknown_length() -> int:
    """Steps that the optimizer has counted after 6 epochs of 3 batches, whose number Keras does not know."""
    model = one_weight(keras.optimizers.SGD(1.0))
    ones = tf.ones((3, 1))
    examples = tf.data.Dataset.from_tensor_slices((ones, ones)).batch(1).filter(lambda *_: True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(examples, epochs=6, verbose=0)
    return int(model.optimizer.iterations.numpy())


def first_step() -> float:
    """A weight of 1 after a step of 0.001 by ScheduleFreeAdamW."""
    model = one_weight(keras.optimizers.ScheduleFreeAdamW(0.001))
    model.set_weights([np.ones((1, 1))])
    return trained(model)


def _loaded_late() -> float:
    """The same after weights of 3 were loaded into a model whose optimizer is built."""
    model = one_weight(keras.optimizers.ScheduleFreeAdamW(0.001))
    model.optimizer.build(model.trainable_variables)
    model.set_weights([np.full((1, 1), 3.0)])
    return trained(model)


def first_steps() -> list[float]:
    """Weights of 1 and 3 after a step of 0.001 by ScheduleFreeAdamW."""
    return [first_step(), _loaded_late()]
