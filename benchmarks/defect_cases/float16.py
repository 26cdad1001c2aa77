"""Training in 16 bits, which can fail without an error."""

from functools import partial

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case, RefusedError, repaired
from tfopt.repairs.probes import one_device


def set_policy(with_tfopt, name):
    """Sets the global policy."""
    (tfopt.precision.set_policy if with_tfopt else keras.config.set_dtype_policy)(name)


def loaded(with_tfopt):
    """A float16 model, trained for 8 steps, saved, and loaded under the global policy float32."""
    set_policy(with_tfopt, "mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    model.fit(np.full((8, 1), 0.1), np.zeros((8, 1)), batch_size=1, verbose=0)
    return model


def reload(model, folder):
    """The model, saved and loaded under the global policy float32."""
    model.save(folder / "model.keras")
    keras.config.set_dtype_policy("float32")
    return keras.saving.load_model(folder / "model.keras")


def loaded_steps(with_tfopt, folder):
    """Steps of the optimizer in a loaded model, trained for 8."""
    return int(reload(loaded(with_tfopt), folder).optimizer.iterations.numpy())


def loaded_scale(with_tfopt, folder):
    """Its loss scale."""
    optimizer = reload(loaded(with_tfopt), folder).optimizer
    return float(optimizer.dynamic_scale.numpy()) if hasattr(optimizer, "dynamic_scale") else "none"


def saturated(with_tfopt, folder):
    """The loss of an example whose logit is 30 below the other."""
    x, y = np.ones((8, 1), "float32"), np.ones(8, int)
    set_policy(with_tfopt, "mixed_float16")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, use_bias=False), keras.layers.Softmax()])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    model.set_weights([np.array([[30.0, 0.0]])])
    if with_tfopt:
        report = tfopt.precision.check(model, (x, y), policy="mixed_float16")
        if not report.passed:
            raise RefusedError(str(report))
    return float(model.evaluate(x, y, verbose=0))


def under(with_tfopt, folder, policy, measure):
    """What a probe measures, which sets this global policy."""
    set_policy(with_tfopt, policy)
    return measure()


class Counting(keras.layers.Layer):
    """Counts its calls in training, in a state of float32."""

    def build(self, shape):
        self.n = self.add_weight(shape=(), initializer="zeros", trainable=False, name="n")

    def call(self, x, training=False):
        if training:
            self.n.assign_add(1.0)
        return x


def refused_by_check(model, *batch):
    """Raises if check does not let the model train in bfloat16."""
    report = tfopt.precision.check(model, batch, policy="mixed_bfloat16")
    if not report.passed:
        raise RefusedError(str(report))


def counted(with_tfopt, folder):
    """What a layer has counted after 300 steps."""
    layer = Counting(dtype="mixed_bfloat16", name="counting")
    model = keras.Sequential([keras.Input((1,)), layer, keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((300, 1), "float32")
    if with_tfopt:
        refused_by_check(model, x[:8], x[:8])
    model.fit(x, x, batch_size=1, verbose=0)
    return float(layer.n)


def bias_gradient(with_tfopt, folder):
    """How far a step of 1 moves a bias that 4,096 positions share, whose gradients are 1 each."""
    layer = keras.layers.Dense(2, dtype="mixed_bfloat16", name="shared")
    model = keras.Sequential([keras.Input((4096, 1)), layer])
    model.compile(keras.optimizers.SGD(1.0), lambda y, found: -8192.0 * tf.cast(found, tf.float32), jit_compile=False)
    x = np.ones((1, 4096, 1), "float32")
    if with_tfopt:
        report = tfopt.precision.check(model, (x, x), policy={})
        if any("shared/bias" in problem for problem in report.problems):
            raise RefusedError(str(report))
    model.fit(x, x, verbose=0)
    return float(layer.bias[0])


CASES = (
    Case(
        "D7",
        "a step of 1 moves the weight of a float16 layer by",
        1,
        partial(repaired, name="loss_scaling", measure=one_device.float16_layer),
        1e-3,
    ),
    Case("D8", "optimizer steps after loading a model trained for 8", 8, loaded_steps),
    Case("D8", "its loss scale", 2.0**15, loaded_scale),
    Case(
        "D9",
        "a step of 1 without `scale_loss` moves the weight by",
        1,
        partial(under, policy="mixed_float16", measure=one_device.forgotten_scale),
        1e-3,
    ),
    Case("D10", "loss of an example 30 logits wrong", float(np.log1p(np.exp(30))), saturated, 0.01),
    Case(
        "D18",
        "policy after `clear_session`, set to mixed_bfloat16",
        "mixed_bfloat16",
        partial(under, policy="mixed_bfloat16", measure=one_device.cleared_policy),
    ),
    Case("D27", "a state counted up 300 times in bfloat16", 300, counted),
    Case("D28", "gradient of a bias that 4,096 positions share, 1 each, in bfloat16", 4096, bias_gradient, 40),
    Case(
        "D21",
        "share of 5,000 ids looked up wrong in bfloat16",
        0,
        partial(under, policy="mixed_bfloat16", measure=one_device.wrong_ids),
    ),
)
