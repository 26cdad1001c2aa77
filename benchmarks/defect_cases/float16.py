"""Training in 16 bits, which can fail without an error."""

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case, RefusedError

TINY = 1e-8  # a gradient that float16 rounds to 0


def set_policy(with_tfopt, name):
    """Sets the global policy."""
    (tfopt.precision.set_policy if with_tfopt else keras.config.set_dtype_policy)(name)


def tiny_loss(y, y_pred):
    """Its gradient is -1e-8 for each prediction."""
    return -TINY * tf.cast(y_pred, tf.float32)


def one_weight(policy, kind=keras.Sequential, rate=1 / TINY, **options):
    """A model of one weight, from 0, which a step should move to 1."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=policy)
    model = kind([keras.Input((1,)), layer])
    model.compile(keras.optimizers.SGD(rate), tiny_loss, jit_compile=False, **options)
    return model


def moved(model):
    """How far a step moves the weight."""
    model.fit(np.ones((1, 1)), np.ones((1, 1)), verbose=0)
    return float(model.get_weights()[0][0, 0])


def layer_policy(with_tfopt, folder):
    """How far a step moves the weight of a float16 layer in a float32 model."""
    if with_tfopt:
        tfopt.repairs.install("loss_scaling")
    return moved(one_weight("mixed_float16"))


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


class Forgetful(keras.Sequential):
    """A train_step that does not scale its loss."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def forgotten(with_tfopt, folder):
    """How far a step without scale_loss moves a weight that should move by 1."""
    set_policy(with_tfopt, "mixed_float16")
    model = Forgetful([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    return moved(model)  # the gradient of (w - 1)² is -2


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


def cleared(with_tfopt, folder):
    """The global policy after clear_session."""
    set_policy(with_tfopt, "mixed_bfloat16")
    keras.utils.clear_session()
    return keras.config.dtype_policy().name


IDS = 5_000


def wrong_ids(with_tfopt, folder):
    """The share of ids whose embedding is another id's, in a Sequential without Input."""
    set_policy(with_tfopt, "mixed_bfloat16")
    # A row holds its number, in digits that bfloat16 holds.
    table = np.stack([np.arange(IDS) // 100, np.arange(IDS) % 100], axis=1)
    model = keras.Sequential([keras.layers.Embedding(IDS, 2)])
    ids = np.arange(IDS)[:, None]
    model.compile("sgd", "mse", jit_compile=False)
    model.build((None, 1))
    model.set_weights([table])
    found = model.predict(ids, verbose=0)[:, 0]
    return float(np.mean(np.any(found != table, axis=1)))


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
    Case("D7", "a step of 1 moves the weight of a float16 layer by", 1, layer_policy, 1e-3),
    Case("D8", "optimizer steps after loading a model trained for 8", 8, loaded_steps),
    Case("D8", "its loss scale", 2.0**15, loaded_scale),
    Case("D9", "a step of 1 without `scale_loss` moves the weight by", 1, forgotten, 1e-3),
    Case("D10", "loss of an example 30 logits wrong", float(np.log1p(np.exp(30))), saturated, 0.01),
    Case("D18", "policy after `clear_session`, set to mixed_bfloat16", "mixed_bfloat16", cleared),
    Case("D27", "a state counted up 300 times in bfloat16", 300, counted),
    Case("D28", "gradient of a bias that 4,096 positions share, 1 each, in bfloat16", 4096, bias_gradient, 40),
    Case("D21", "share of 5,000 ids looked up wrong in bfloat16", 0, wrong_ids),
)
