"""Models whose losses several replicas may weigh or log wrongly.

    python replica_losses_cases.py stock|repaired|workers few|rest [FILE]

Each of the share is trained on one device and on two logical ones; prints, as JSON, the logs and weights of both, or
the error. As two workers, each is trained by both together, and the chief writes that into FILE.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tfopt import distribute, repairs

random = np.random.default_rng(0)
X = random.normal(size=(32, 4)).astype("float32")
Y = random.normal(size=(32, 3)).astype("float32")
LABELS = random.integers(0, 3, 32)


def net(*more, last=None):
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="tanh"), *more, last or layers.Dense(3)])


class Guide(keras.Model):
    """The train_step of Keras' guide to custom steps."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def call(self, x, training=False):
        return self.inside(x, training=training)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.logs(loss)

    def logs(self, loss):
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def loss_of(self, x, y):
        return self.compute_loss(y=y, y_pred=self(x, training=True))


class Weighted(Guide):
    """A sum of losses, with a weight."""

    def loss_of(self, x, y):
        y_pred = self(x, training=True)
        absolute = keras.losses.MeanAbsoluteError()(y, y_pred)
        return 0.25 * self.compute_loss(y=y, y_pred=y_pred) + absolute / 2.0


class Multiplied(Guide):
    """Logs what its author has multiplied again."""

    def logs(self, loss):
        return {"loss": loss * tf.distribute.get_strategy().num_replicas_in_sync}


class Logged(Guide):
    """Returns its loss in the logs."""

    def logs(self, loss):
        return {"own": loss}


class ByHand(Guide):
    """A mean of its own."""

    def loss_of(self, x, y):
        return ops.mean((y - self(x, training=True)) ** 2)


class Divided(Guide):
    """A mean of its own that is divided."""

    def loss_of(self, x, y):
        return tf.nn.scale_regularization_loss(ops.mean((y - self(x, training=True)) ** 2))


class Averaged(Guide):
    """TensorFlow's guide to distributed training."""

    def loss_of(self, x, y):
        return tf.nn.compute_average_loss(ops.mean((y - self(x, training=True)) ** 2, axis=-1), global_batch_size=8)


class Unreduced(Guide):
    """A loss that is reduced by hand."""

    def loss_of(self, x, y):
        loss = keras.losses.MeanSquaredError(reduction=None)(y, self(x, training=True))
        return ops.sum(loss) / 8


class Mixed(Guide):
    """A loss of Keras' and a term of its own."""

    def __init__(self, term):
        super().__init__(net())
        self.term = term

    def loss_of(self, x, y):
        y_pred = self(x, training=True)
        return self.compute_loss(y=y, y_pred=y_pred) + self.term(self, x, y, y_pred)


class Variational(keras.Model):
    """A reconstruction by Keras, and a divergence by hand."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(4), layers.Dense(3)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, log_var = ops.split(self.encoder(x), 2, -1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return self.decoder(mean + ops.exp(0.5 * log_var) * noise), mean, log_var

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred, mean, log_var = self(x)
            divergence = -0.5 * ops.mean(ops.sum(1 + log_var - mean**2 - ops.exp(log_var), axis=1))
            loss = keras.losses.MeanSquaredError()(y, y_pred) + divergence
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def gradient_penalty(model, x, y, y_pred):
    """As in a WGAN-GP."""
    between = x + 0.1 * tf.random.uniform([tf.shape(x)[0], 1], seed=1)
    with tf.GradientTape() as tape:
        tape.watch(between)
        critic = model(between, training=True)
    norms = ops.sqrt(ops.sum(tape.gradient(critic, between) ** 2, axis=1))
    return 10.0 * ops.mean((norms - 1.0) ** 2)


class Warmed(Guide):
    """A loss that is scaled by a condition."""

    def loss_of(self, x, y):
        loss = super().loss_of(x, y)
        return tf.cond(self.optimizer.iterations < 3, lambda: 0.1 * loss, lambda: loss)


class LogsNorm(Guide):
    """Logs the gradient of a mean by hand, by which it does not update."""

    def train_step(self, data):
        _, y = data
        logs, weight = super().train_step(data), self.trainable_variables[0]
        with tf.GradientTape() as tape:
            loss = ops.mean(y[:1, :1] * ops.sum(weight))
        return logs | {"norm": 0.0 * ops.norm(tape.gradient(loss, weight))}


class OwnAccumulation(Guide):
    """Updates with gradients of a mean by hand that it has kept in variables."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        if not hasattr(self, "kept"):
            with tf.init_scope():
                self.kept = [tf.Variable(tf.zeros(weight.shape), trainable=False) for weight in weights]
        with tf.GradientTape() as tape:
            loss = ops.mean((y - self(x, training=True)) ** 2)
        for kept, gradient in zip(self.kept, tape.gradient(loss, weights), strict=True):
            kept.assign(gradient)
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y)
        tape.gradient(loss, weights)
        self.optimizer.apply([kept + 0.0 for kept in self.kept], weights)
        return self.logs(loss)


class TwoUpdates(Guide):
    """A second update, of a penalty by hand."""

    def train_step(self, data):
        logs, weights = super().train_step(data), self.trainable_variables
        with tf.GradientTape() as tape:
            loss = 0.1 * sum(ops.sum(ops.square(weight)) for weight in weights)
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return logs


class MeansAlone(Guide):
    """A mean by hand of values that Keras has not reduced."""

    def loss_of(self, x, y):
        return ops.mean(keras.losses.MeanSquaredError(reduction=None)(y, self(x, training=True)))


class GlobalMean(Guide):
    """The sum over a replica's examples, by the number of all."""

    def loss_of(self, x, y):
        return ops.sum(ops.mean((y - self(x, training=True)) ** 2, axis=-1)) / 8.0


class CountedMean(Guide):
    """The same with a number that the replicas count together."""

    def loss_of(self, x, y):
        everywhere = tf.distribute.get_replica_context()
        count = tf.cast(everywhere.all_reduce("SUM", tf.shape(x)[0]), tf.float32)
        return tf.reduce_sum(tf.reduce_mean((y - self(x, training=True)) ** 2, axis=-1)) / count


class Meta(Guide):
    """Differentiates a mean by hand inside the loss that it updates by."""

    def loss_of(self, x, y):
        weight = self.trainable_variables[0]
        with tf.GradientTape() as tape:
            inner = ops.mean((y - self(x, training=True)) ** 2)
        step = tape.gradient(inner, weight)
        return self.compute_loss(y=y, y_pred=self(x, training=True) + 0.1 * ops.mean(step))


class Uncertain(Guide):
    """A loss weighted by a learned weight."""

    def __init__(self, inside):
        super().__init__(inside)
        self.log_weight = self.add_weight(shape=(), initializer="ones")

    def loss_of(self, x, y):
        penalty = tf.nn.scale_regularization_loss(self.log_weight)
        return super().loss_of(x, y) * ops.exp(-self.log_weight) + penalty


def l2(model):
    return 0.1 * ops.sum(ops.square(model.trainable_variables[0]))


def replicas():
    return tf.distribute.get_strategy().num_replicas_in_sync


def mean_error(model, x, y, y_pred):
    return 0.5 * ops.mean((y - y_pred) ** 2)


def mixed(term, **options):
    return compiled(Mixed(term), **options)


class OwnComputeLoss(keras.Sequential):
    """A compute_loss that is a mean of its own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean((y - y_pred) ** 2)


class Added(layers.Layer):
    """Adds a loss."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss = loss

    def call(self, x):
        self.add_loss(self.loss(x))
        return x


class AddedInTraining(Added):
    """Adds a loss while it trains."""

    def call(self, x, training=False):
        return super().call(x) if training else x


class NoisyLoss(layers.Layer):
    """Adds noise and a loss, as the encoder of a variational autoencoder does."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return x + 0.0 * keras.random.normal(ops.shape(x), seed=self.seeds)


def sequential(*more, loss="mse", metrics=(), run_eagerly=False, **options):
    return compiled(net(*more, **options), loss=loss, metrics=list(metrics), run_eagerly=run_eagerly)


def guided(kind, **options):
    return compiled(kind(net()), **options)


def compiled(model, optimizer=None, loss="mse", **options):
    model.compile(optimizer or keras.optimizers.SGD(0.05), loss, **{"jit_compile": False, **options})
    return model


def masked_norm():
    x = keras.Input((4,))
    steps = layers.Reshape((5, 1))(layers.Concatenate()([layers.ReLU()(x), x[:, :1]]))  # one at least is left
    steps = layers.Masking()(steps)
    steps = layers.BatchNormalization(synchronized=True, momentum=0.5)(steps)
    model = keras.Model(x, layers.Dense(3)(layers.GlobalAveragePooling1D()(steps)))
    model.compile("sgd", "mse", jit_compile=False)
    return model


class OfLoss(keras.Sequential):
    """A function of the compiled loss."""

    def compute_loss(self, *args, **kwargs):
        return self.function(super().compute_loss(*args, **kwargs))


def of_loss(function):
    model = OfLoss([keras.Input((4,)), layers.Dense(3)])
    model.function = function
    return compiled(model)


class GivenGradients(Guide):
    """Also differentiates predictions, given the gradients that arrive there."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            predictions = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predictions)
        weights = self.trainable_variables
        tape.gradient(predictions, weights, output_gradients=tf.ones_like(predictions))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.logs(loss)


def own_compute_loss():
    model = OwnComputeLoss([keras.Input((4,)), layers.Dense(3)])
    model.compile("sgd", jit_compile=False)
    return model


def two_outputs(loss):
    x = keras.Input((4,))
    hidden = layers.Dense(5, activation="tanh")(x)
    model = keras.Model(x, {"a": layers.Dense(3, name="a")(hidden), "b": layers.Dense(3, name="b")(hidden)})
    model.compile("sgd", loss, metrics={"a": ["mae"]}, loss_weights={"a": 1.0, "b": 0.5}, jit_compile=False)
    return model


def both(y):
    return {"a": y, "b": 2 * y}


def normed(x):
    return ops.sqrt(ops.mean(ops.square(x)))


def classes(loss, **options):
    return sequential(loss=loss, last=layers.Dense(3, activation="softmax", **options))


CIRCLE = keras.losses.Circle
# Model and labels.
REPAIRED = {
    "guide's step": (lambda: guided(Guide), Y),
    "a weighted sum of losses": (lambda: guided(Weighted), Y),
    "a loss in the logs": (lambda: guided(Logged), Y),
    "eager guide's step": (lambda: guided(Guide, run_eagerly=True), Y),
}
REFUSED = {
    "a mean of its own": (lambda: guided(ByHand), Y),
    "compute_loss with a mean": (own_compute_loss, Y),
    "add_loss of a sum": (lambda: sequential(Added(lambda x: 0.1 * ops.sum(x**2), name="penalty")), Y),
    "add_loss of each example": (lambda: sequential(Added(lambda x: 0.1 * ops.mean(x**2, -1), name="penalty")), Y),
    "compute_loss and L2 by hand": (lambda: mixed(lambda model, x, y, p: l2(model)), Y),
    "compute_loss and L2 by hand, eager": (lambda: mixed(lambda model, x, y, p: l2(model), run_eagerly=True), Y),
    "compute_loss and L2 by hand, float16": (
        lambda: mixed(
            lambda model, x, y, p: l2(model), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05))
        ),
        Y,
    ),
    "the logarithm of a loss": (lambda: of_loss(ops.log), Y),
    "compute_loss and half a mean": (lambda: mixed(mean_error), Y),
    "compute_loss and a gradient penalty": (lambda: mixed(gradient_penalty), Y),
    "a variational autoencoder": (lambda: compiled(Variational(), loss=None), Y),
    "a second update": (lambda: guided(TwoUpdates), Y),
    "kept gradients of a mean": (lambda: guided(OwnAccumulation), Y),
    "a mean of unreduced losses": (lambda: guided(MeansAlone), Y),
    "add_loss of a sum in training": (
        lambda: sequential(layers.Dropout(0.2), AddedInTraining(lambda x: 0.1 * ops.sum(x**2), name="penalty")),
        Y,
    ),
    "in-batch softmax": (
        lambda: sequential(
            loss=lambda y, p: -ops.diagonal(ops.log_softmax(ops.matmul(p, ops.transpose(y)))),
        ),
        Y,
    ),
    "Circle beside another": (lambda: two_outputs({"a": "mse", "b": CIRCLE()}), {"a": Y, "b": LABELS}),
}
HEALTHY = {
    "mse": (sequential, Y),
    "gradients given by hand": (lambda: guided(GivenGradients), Y),
    "a loss with a factor and an offset": (lambda: of_loss(lambda loss: 2 * loss + 0.0), Y),
    "mae and metrics": (lambda: sequential(loss="mae", metrics=["mse", "cosine_similarity"]), Y),
    "sum": (lambda: sequential(loss=keras.losses.MeanSquaredError(reduction="sum")), Y),
    "sparse labels": (lambda: classes("sparse_categorical_crossentropy"), LABELS),
    "one-hot labels, smoothed": (
        lambda: classes(keras.losses.CategoricalCrossentropy(label_smoothing=0.1)),
        np.eye(3, dtype="float32")[LABELS],
    ),
    "function": (lambda: sequential(loss=lambda y, p: ops.mean((y - p) ** 4, -1)), Y),
    "weight decay": (lambda: sequential(last=layers.Dense(3, kernel_regularizer="l2")), Y),
    "activity": (lambda: sequential(last=layers.Dense(3, activity_regularizer="l1")), Y),
    "add_loss of a mean": (lambda: sequential(Added(lambda x: 0.1 * ops.mean(x**2))), Y),
    "add_loss of nothing": (lambda: sequential(Added(lambda x: 0.0 * ops.sum(x))), Y),
    "add_loss of a norm": (lambda: sequential(Added(normed)), None),
    "noise and a loss": (lambda: sequential(NoisyLoss()), Y),
    "batch norm": (lambda: sequential(layers.BatchNormalization()), None),
    "synchronized batch norm": (lambda: sequential(layers.BatchNormalization(synchronized=True)), Y),
    "dropout": (lambda: sequential(layers.Dropout(0.5, seed=1)), None),
    "two outputs": (lambda: two_outputs({"a": "mse", "b": "mae"}), both(Y)),
    "two outputs, a sum": (
        lambda: two_outputs({"a": "mse", "b": keras.losses.MeanAbsoluteError(reduction="sum")}),
        both(Y),
    ),
    "one of two outputs": (lambda: two_outputs({"a": "mse", "b": None}), both(Y)),
    "divided by hand": (lambda: guided(Divided), Y),
    "averaged by TensorFlow": (lambda: guided(Averaged), Y),
    "reduced by hand": (lambda: guided(Unreduced), Y),
    "multiplied by hand": (lambda: guided(Multiplied), Y),
    "compute_loss and a divided term": (
        lambda: mixed(lambda model, x, y, p: tf.nn.scale_regularization_loss(l2(model) + mean_error(model, x, y, p))),
        Y,
    ),
    "compute_loss and L2 by hand, divided": (lambda: mixed(lambda model, x, y, p: l2(model) / replicas()), Y),
    "compute_loss and a mean by hand, by all examples": (
        lambda: mixed(
            lambda model, x, y, p: ops.sum((y - p) ** 2) / (3.0 * ops.cast(ops.shape(x)[0] * replicas(), "float32"))
        ),
        Y,
    ),
    "compute_loss and a sum by hand, by all examples": (
        lambda: mixed(lambda model, x, y, p: 0.1 * ops.sum((y - p) ** 2) / 8.0),
        Y,
    ),
    "compute_loss and a constant": (lambda: mixed(lambda model, x, y, p: ops.mean(y**2)), Y),
    "compute_loss and a stopped term": (lambda: mixed(lambda model, x, y, p: ops.stop_gradient(ops.mean(p))), Y),
    "the mean over all examples": (lambda: guided(GlobalMean), Y),
    "the mean over all examples, eager": (lambda: guided(GlobalMean, run_eagerly=True), Y),
    "the mean over counted examples": (lambda: guided(CountedMean), Y),
    "a gradient inside the loss": (lambda: guided(Meta), None),
    "a loss in a condition": (lambda: guided(Warmed), Y),
    "a logged gradient": (lambda: guided(LogsNorm), Y),
    "a learned weight of the loss": (lambda: guided(Uncertain), Y),
    "add_loss of a mean in training": (lambda: sequential(AddedInTraining(lambda x: 0.1 * ops.mean(x**2))), Y),
    "synchronized batch norm behind a mask": (masked_norm, Y),
    "bfloat16": (lambda: sequential(last=layers.Dense(3, dtype="mixed_bfloat16")), None),
    "float16": (lambda: sequential(last=layers.Dense(3, dtype="mixed_float16")), None),
    "labels of another rank": (lambda: sequential(last=layers.Dense(1)), Y[:, 0]),
}
# Of the slow tests: all that is repaired, each reason to refuse, and losses and layers that are near to either.
FEW = {
    "here": [
        *REPAIRED,
        "a mean of its own",
        "compute_loss with a mean",
        "compute_loss and L2 by hand",
        "compute_loss and L2 by hand, eager",
        "compute_loss and L2 by hand, float16",
        "compute_loss and half a mean",
        "compute_loss and a gradient penalty",
        "a variational autoencoder",
        "a second update",
        "add_loss of a sum",
        "add_loss of a sum in training",
        "in-batch softmax",
        "Circle beside another",
        "sum",
        "sparse labels",
        "activity",
        "add_loss of a mean",
        "add_loss of a norm",
        "synchronized batch norm",
        "two outputs, a sum",
        "averaged by TensorFlow",
        "reduced by hand",
        "multiplied by hand",
        "compute_loss and a divided term",
        "compute_loss and L2 by hand, divided",
        "compute_loss and a sum by hand, by all examples",
        "the mean over all examples",
        "the logarithm of a loss",
        "gradients given by hand",
        "synchronized batch norm behind a mask",
        "float16",
    ],
    "workers": [
        "guide's step",
        "compute_loss and L2 by hand",
        "synchronized batch norm behind a mask",
        "a loss in the logs",
        "a mean of its own",
        "add_loss of a sum",
        "sum",
        "float16",
    ],
}


def in_share(share, where):
    """Returns the cases that a share trains on two devices or in two processes."""
    cases = REPAIRED | REFUSED | HEALTHY
    return {name: case for name, case in cases.items() if (name in FEW[where]) == (share == "few")}


def trained(make, y, strategy):
    with strategy.scope():
        keras.utils.set_random_seed(2)
        model = make()
    try:
        history = model.fit(X, Y if y is None else y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"history": history, "weights": [weight.numpy().ravel().tolist() for weight in model.weights]}


def work():
    strategy, cases = distribute.strategy("multi_worker"), in_share(sys.argv[2], "workers")
    found = {name: trained(*cases[name], strategy) for name in cases}
    if distribute.resolve().is_chief:
        Path(sys.argv[3]).write_text(json.dumps(found))


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy, cases = distribute.strategy("auto"), in_share(sys.argv[2], "here")
    if sys.argv[1] == "stock":
        repairs.remove("replica_losses")
    found = {
        name: [trained(*cases[name], where) for where in (tf.distribute.get_strategy(), strategy)]
        for name in cases
        if sys.argv[1] == "repaired" or name not in HEALTHY
    }
    print(json.dumps(found))


if __name__ == "__main__":
    work() if sys.argv[1] == "workers" else main()
