"""Kinds of training, each of eight batches of five examples: of models, optimizers, losses, metrics and data."""

import keras
import numpy as np
import tensorflow as tf
from fitting import Steps, X, Y, compiled, dense_net

from tfopt.pipelines import build_pipeline

L, M = keras.layers, keras.metrics
_random = np.random.default_rng(1)
IMAGES = _random.normal(size=(40, 6, 6, 2)).astype("float32")
WORDS = _random.integers(1, 20, size=(40, 7))
WORDS[:, 5:] = 0  # masked
SERIES = _random.normal(size=(40, 7, 3)).astype("float32")
WEIGHTS = np.linspace(0.1, 2, 40).astype("float32")
BATCH = 5


def fed(x=X, y=Y, *more, **arguments):
    """A function that makes arguments of `fit`."""
    return lambda: {"x": tf.data.Dataset.from_tensor_slices((x, y, *more)).batch(BATCH)} | arguments


def of_layers(shape, *layers, **options):
    """A function that makes a model of these layers, behind which it has four outputs."""
    return lambda: compiled(keras.Sequential([keras.Input(shape), *[make() for make in layers], L.Dense(4)]), **options)


def dense(*layers, **options):
    return of_layers((8,), *layers, **options), fed()


def images(*layers, **options):
    return of_layers((6, 6, 2), *layers, L.Flatten, **options), fed(IMAGES)


def words(*layers, **options):
    body = (lambda: L.Embedding(20, 6, mask_zero=True), *layers)
    return of_layers((7,), *body, **options), fed(WORDS)


def series(*layers, **options):
    return of_layers((7, 3), *layers, **options), fed(SERIES)


def by(optimizer, **options):
    """A dense net that this optimizer trains; a function makes it."""
    return lambda: dense_net(optimizer=optimizer(), **options), fed()


def wrapped(**options):
    return by(lambda: keras.optimizers.SGD(0.1, momentum=0.9, **options))


def regression(loss, *metrics):
    def make():
        return compiled(
            keras.Sequential([keras.Input((8,)), L.Dense(5, "tanh"), L.Dense(4)]),
            loss=loss,
            metrics=[one(name=one.__name__) for one in metrics],
        )

    return make, fed(X, np.tanh(X[:, 4:]))


def binary(loss, *metrics):
    def make():
        return compiled(
            keras.Sequential([keras.Input((8,)), L.Dense(1, "sigmoid")]),
            loss=loss,
            metrics=[one(name=one.__name__) for one in metrics],
        )

    return make, fed(X, (Y % 2)[:, None].astype("float32"))


class Attending(keras.Model):
    """A transformer's block over words."""

    def __init__(self):
        super().__init__()
        self.embedding, self.normalization = L.Embedding(20, 8), L.LayerNormalization()
        self.attention, self.output_layer = L.MultiHeadAttention(2, 4, dropout=0.2), L.Dense(4)

    def call(self, inputs, training=None):
        x = self.embedding(inputs)
        x = self.normalization(x + self.attention(x, x, training=training, use_causal_mask=True))
        return self.output_layer(keras.ops.mean(x, axis=1))


class Adversaries(keras.Model):
    """Two networks and two optimizers, in a train_step of its own."""

    def __init__(self):
        super().__init__()
        self.maker = keras.Sequential([keras.Input((3,)), L.Dense(8)])
        self.judge = keras.Sequential([keras.Input((8,)), L.Dense(4, "relu"), L.Dropout(0.3), L.Dense(1)])
        self.seeds = keras.random.SeedGenerator(3)
        self.judges_optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, data):
        real, _ = data
        noise = keras.random.normal((tf.shape(real)[0], 3), seed=self.seeds)
        with tf.GradientTape() as tape:
            difference = tf.reduce_mean(self.judge(self.maker(noise), training=True) - self.judge(real, training=True))
        gradients = tape.gradient(difference, self.judge.trainable_variables)
        self.judges_optimizer.apply(gradients, self.judge.trainable_variables)
        with tf.GradientTape() as tape:
            made = -tf.reduce_mean(self.judge(self.maker(noise), training=False))
        self.optimizer.apply(tape.gradient(made, self.maker.trainable_variables), self.maker.trainable_variables)
        return {"difference": difference, "made": made}


class Penalized(keras.Sequential):
    """A compute_loss and a compute_metrics of its own, and a loss that is added."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * tf.reduce_mean(y_pred**2)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        return super().compute_metrics(x, y, y_pred, sample_weight) | {"largest": tf.reduce_max(y_pred)}


def two_headed():
    inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((8,), name="b")}
    joined = L.Concatenate()([inputs["a"], inputs["b"]])
    heads = {"one": L.Dense(1, activation="sigmoid", name="one")(joined), "two": L.Dense(4, name="two")(joined)}
    metrics = {"one": [keras.metrics.AUC(name="auc", num_thresholds=20)], "two": ["mae"]}
    loss = {"one": "binary_crossentropy", "two": "mse"}
    return compiled(keras.Model(inputs, heads), loss=loss, metrics=metrics, loss_weights={"one": 0.3, "two": 1.7})


def scaled():
    """Loss scaling that begins so high that the first steps overflow and are skipped."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=2.0**20)
    body = L.Dense(6, activation="relu", dtype="mixed_float16")
    return compiled(keras.Sequential([keras.Input((8,)), body, L.Dense(4, dtype="float32")]), optimizer=optimizer)


def in_bfloat16():
    return compiled(keras.Sequential([keras.Input((8,)), L.Dense(6, "relu", dtype="mixed_bfloat16"), L.Dense(4)]))


def piped(**options):
    return lambda: {"x": build_pipeline((X, Y), batch_size=BATCH, **options)}


def endless():
    while True:
        for start in range(0, 40, BATCH):
            yield X[start : start + BATCH], Y[start : start + BATCH]


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return X[index * BATCH :][:BATCH], Y[index * BATCH :][:BATCH]


def batched(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)


def bucketed():
    """Batches of two shapes."""
    widths = [7] * 4 + [5] * 4
    parts = [WORDS[at * BATCH :][:BATCH, :width] for at, width in enumerate(widths)]
    spec = (tf.TensorSpec((None, None), tf.int64), tf.TensorSpec((None,), tf.int64))
    labels = [Y[at * BATCH :][:BATCH] for at in range(8)]
    made = tf.data.Dataset.from_generator(lambda: zip(parts, labels, strict=True), output_signature=spec)
    return {"x": made.apply(tf.data.experimental.assert_cardinality(8))}


K = keras.optimizers
_decay = K.schedules.CosineDecay
KINDS = {
    # models
    "dense, dropout": (dense_net, fed()),
    "batch norm": dense(lambda: L.Dense(6), L.BatchNormalization, metrics=["accuracy"], optimizer="adam"),
    "a metric that is a variable": (lambda: dense_net(metrics=[Steps()]), fed()),
    "convolution, batch norm": images(lambda: L.Conv2D(3, 3), L.BatchNormalization, L.ReLU, optimizer="adam"),
    "depthwise, pooling": images(lambda: L.SeparableConv2D(4, 3), L.MaxPooling2D, optimizer="adam"),
    "group norm, spatial dropout": images(
        lambda: L.Conv2D(4, 3), lambda: L.GroupNormalization(2), lambda: L.SpatialDropout2D(0.4)
    ),
    "images augmented in the model": images(
        lambda: L.RandomFlip("horizontal", seed=1),
        lambda: L.RandomTranslation(0.2, 0.2, seed=2),
        lambda: L.Conv2D(3, 3),
    ),
    "LSTM, masked": words(lambda: L.LSTM(5)),
    "GRU, dropout": words(lambda: L.GRU(5, dropout=0.2, recurrent_dropout=0.2)),
    "both directions": words(lambda: L.Bidirectional(L.SimpleRNN(4))),
    "stateful LSTM": (
        lambda: compiled(
            keras.Sequential([keras.Input((7, 3), batch_size=5), L.LSTM(4, stateful=True), L.Dense(4)]), metrics=None
        ),
        fed(SERIES),
    ),
    "convolution over time": series(lambda: L.Conv1D(5, 3, activation="gelu"), L.GlobalAveragePooling1D),
    "transformer": (lambda: compiled(Attending(), optimizer="adam"), fed(WORDS)),
    "noise": dense(lambda: L.GaussianNoise(0.2), lambda: L.Dense(5), lambda: L.AlphaDropout(0.2)),
    "spectral norm": dense(lambda: L.SpectralNormalization(L.Dense(5))),
    "regularized": dense(lambda: L.Dense(5, kernel_regularizer="l2", bias_regularizer="l1", activity_regularizer="l2")),
    "constrained": dense(lambda: L.Dense(5, kernel_constraint="max_norm", bias_constraint="non_neg")),
    "frozen layer": dense(lambda: L.Dense(5, trainable=False), L.BatchNormalization),
    "two heads": (two_headed, fed({"a": X, "b": -X}, {"one": Y[:, None] % 2, "two": X[:, :4]})),
    "own losses": (lambda: compiled(Penalized([keras.Input((8,)), L.Dense(4)])), fed()),
    "adversaries": (lambda: compiled(Adversaries(), optimizer="sgd", metrics=None, loss=None), fed()),
    # 16 bits
    "float16, steps skipped": (scaled, fed()),
    "bfloat16": (in_bfloat16, fed()),
    # optimizers
    **{
        name: by(getattr(K, name))
        for name in (
            "SGD",
            "Adam",
            "AdamW",
            "Adamax",
            "Adagrad",
            "Adadelta",
            "Adafactor",
            "Nadam",
            "RMSprop",
            "Ftrl",
            "Lion",
        )
    },
    "Muon": by(lambda: K.Muon(0.01)),
    "AMSGrad, weight decay": by(lambda: K.Adam(amsgrad=True, weight_decay=0.01)),
    "learning rate by schedule": by(lambda: K.Adam(_decay(0.1, 12, warmup_target=0.2, warmup_steps=3))),
    "averaged weights": wrapped(use_ema=True, ema_overwrite_frequency=3),
    "gradients accumulated": wrapped(gradient_accumulation_steps=3),
    "clipped by value": wrapped(clipvalue=0.01),
    "clipped by norm": wrapped(clipnorm=0.05),
    "clipped by global norm": wrapped(global_clipnorm=0.05),
    "scaled loss": wrapped(loss_scale_factor=8.0),
    # losses and metrics
    "mean squared error": regression("mse", M.MeanAbsoluteError, M.CosineSimilarity),
    "Huber": regression("huber", M.RootMeanSquaredError, M.R2Score),
    "log-cosh, total": regression("log_cosh", M.MeanSquaredLogarithmicError),
    "binary cross-entropy": binary("binary_crossentropy", M.Precision, M.Recall),
    "focal": binary("binary_focal_crossentropy", M.AUC, M.TruePositives),
    "hinge": binary("hinge", M.BinaryAccuracy),
    "top k": (lambda: dense_net(metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)]), fed()),
    "weighted metrics": (lambda: dense_net(weighted_metrics=["accuracy"]), fed(X, Y, WEIGHTS)),
    # data
    "arrays, weighted": (dense_net, lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS, "batch_size": BATCH}),
    "classes weighted": (dense_net, fed(class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5})),
    "validated": (dense_net, lambda: {"x": X, "y": Y, "batch_size": BATCH, "validation_split": 0.25}),
    "validated now and then": (
        dense_net,
        lambda: {"x": batched(), "validation_data": batched().take(3), "validation_freq": 2},
    ),
    "one iterator for all epochs": (dense_net, lambda: {"x": batched(), "steps_per_epoch": 4}),
    "endless": (dense_net, lambda: {"x": batched().repeat(), "steps_per_epoch": 7, "validation_data": (X, Y)}),
    "generator": (dense_net, lambda: {"x": endless(), "steps_per_epoch": 5}),
    "smaller last batch": (dense_net, lambda: {"x": tf.data.Dataset.from_tensor_slices((X[:38], Y[:38])).batch(BATCH)}),
    "two shapes in turn": (lambda: compiled(Attending(), optimizer="adam"), bucketed),
    "shuffled by tf.data": (dense_net, lambda: {"x": batched().shuffle(8, seed=3)}),
    "PyDataset": (dense_net, lambda: {"x": Batches(workers=2, max_queue_size=2)}),
    "pipeline": (dense_net, piped(seed=3)),
    "pipeline, padded": (dense_net, piped(seed=3, remainder="pad", transform=lambda x, y: (x[:8], y))),
    "pipeline, augmented": (
        dense_net,
        piped(seed=3, augment=lambda x, y, seed: (x + tf.random.stateless_normal([8], seed), y)),
    ),
    "late start": (dense_net, fed(initial_epoch=1)),
}
