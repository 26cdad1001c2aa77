"""Healthy nets of dense layers and tables, with data that they can learn."""

import keras
import numpy as np

layers, ops = keras.layers, keras.ops
ROWS = 256


def random(seed=0):
    return np.random.default_rng(seed)


def cross_entropy():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(inputs, outputs, loss=None, *, kind=keras.Model, optimizer=None, **options):
    model = kind(inputs, outputs, name="net")
    model.compile(optimizer or keras.optimizers.Adam(3e-3), loss or cross_entropy(), **options)
    return model


def rows(features=8, classes=3):
    """Standard normal features, and the class that a random linear map gives them."""
    x = random().normal(size=(ROWS, features)).astype("float32")
    return x, (x @ random(1).normal(size=(features, classes))).argmax(-1).astype("int32")


def of_rows(body, data=None, *, classes=3, **options):
    """A classifier of rows, from the function of a symbolic tensor that makes its features."""
    x, y = data or rows()
    inputs = keras.Input(x.shape[1:], dtype=x.dtype.name)
    return compiled(inputs, layers.Dense(classes, name="head", dtype="float32")(body(inputs)), **options), (x, y)


def mlp():
    def body(x):
        for _ in range(3):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(16)(x)))
        return x

    return of_rows(body)


def deep_mlp():
    """Sixteen layers, each adding to a stream."""

    def body(x):
        x = layers.Dense(16)(x)
        for _ in range(16):
            x = x + layers.Dense(16, activation="relu")(layers.LayerNormalization()(x))
        return x

    return of_rows(body)


def activations():
    def body(x):
        names = ("gelu", "selu", "swish", "elu", "softplus", "tanh", "sigmoid", "mish", "relu6", "hard_silu", "softmax")
        return layers.Concatenate()([layers.Dense(4, activation=name)(x) for name in names])

    return of_rows(body)


def noisy():
    def body(x):
        x = layers.GaussianDropout(0.2)(layers.GaussianNoise(0.5)(layers.Dense(16, activation="relu")(x)))
        return layers.AlphaDropout(0.2)(layers.Dropout(0.5)(layers.Dense(16, activation="selu")(x)))

    return of_rows(body)


class NoiseOfItsDtype(layers.Layer):
    """Draws in the dtype that it computes in, so that no two dtypes draw the same."""

    def call(self, x, training=False):
        return x + keras.random.normal(ops.shape(x), dtype=x.dtype) if training else x


def noise_of_its_dtype():
    return of_rows(lambda x: layers.Dense(16, activation="relu")(NoiseOfItsDtype()(layers.Dense(16)(x))))


class StochasticDepth(layers.Layer):
    """Leaves out a residual branch for some examples, drawn in the dtype that it computes in."""

    def call(self, x, branch, training=False):
        if not training:
            return x + 0.8 * branch
        kept = keras.random.uniform((ops.shape(x)[0], 1), dtype=x.dtype) < 0.8
        return ops.where(kept, x + branch, x)


def stochastic_depth():
    def body(x):
        x = layers.Dense(16)(x)
        for _ in range(2):
            x = StochasticDepth()(x, layers.Dense(16, activation="relu")(x))
        return x

    return of_rows(body)


def autoencoder():
    x, _ = rows()
    inputs = keras.Input((8,))
    code = layers.Dense(4, activation="tanh")(layers.Dense(16, activation="relu")(inputs))
    return compiled(inputs, layers.Dense(8, name="head")(layers.Dense(16, activation="relu")(code)), "mse"), (x, x)


class Sampling(layers.Layer):
    """As in Keras' example of a variational autoencoder."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, mean, spread):
        mean, spread = (ops.cast(x, "float32") for x in (mean, spread))
        self.add_loss(-0.005 * ops.mean(1 + spread - mean**2 - ops.exp(spread)))
        return mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.seed)


def variational():
    x, _ = rows()
    inputs = keras.Input((8,))
    hidden = layers.Dense(16, activation="relu")(inputs)
    code = Sampling()(layers.Dense(4)(hidden), layers.Dense(4)(hidden))
    return compiled(inputs, layers.Dense(8, name="head")(layers.Dense(16, activation="relu")(code)), "mse"), (x, x)


def siamese():
    """Two halves through one tower; the cosine of what comes out, at a temperature."""
    x, y = rows()
    one, two = keras.Input((8,), name="one"), keras.Input((8,), name="two")
    tower = keras.Sequential([keras.Input((8,)), layers.Dense(16, "relu"), layers.Dense(8), layers.UnitNormalization()])
    cosine = layers.Dot(1, name="cosine")([tower(one), tower(two)])
    model = compiled(
        {"one": one, "two": two}, layers.Dense(1, name="head")(cosine), keras.losses.BinaryCrossentropy(True)
    )
    return model, ({"one": x, "two": x[::-1].copy()}, (y == y[::-1]).astype("float32")[:, None])


def several():
    """Two inputs, one of ids; two outputs with losses, weights of examples, and a nested model."""
    x, y = rows()
    values, tokens = keras.Input((8,), name="values"), keras.Input((5,), dtype="int32", name="tokens")
    found = layers.Concatenate()([values, layers.Flatten()(layers.Embedding(10, 4)(tokens))])
    found = keras.Sequential([keras.Input((28,)), layers.Dense(16, activation="relu")], name="inner")(found)
    outputs = {"a": layers.Dense(3, name="a")(found), "b": layers.Dense(1, name="b")(found) * 2.0}
    model = compiled({"values": values, "tokens": tokens}, outputs, {"a": cross_entropy(), "b": "mse"})
    given = {"values": x, "tokens": random().integers(10, size=(ROWS, 5)).astype("int32")}
    weights = {"a": random().random(ROWS).astype("float32"), "b": np.ones(ROWS, "float32")}
    return model, (given, {"a": y, "b": x[:, :1]}, weights)


def tabular():
    """Keras' own preprocessing in the model: numbers, years, whole numbers and words."""
    x, y = rows()
    years = random().integers(1990, 2026, size=(ROWS, 1)).astype("float32")
    words = np.array(["red", "green", "blue"])[y][:, None].astype(object)
    numbers = layers.Normalization()
    numbers.adapt(np.concatenate([x, years], -1))
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    bins = layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")
    inputs = {
        "numbers": keras.Input((9,), name="numbers"),
        "word": keras.Input((1,), dtype="string", name="word"),
        "hashed": keras.Input((1,), dtype="int64", name="hashed"),
    }
    hashed = layers.Embedding(50, 4)(layers.Hashing(50)(inputs["hashed"]))
    found = [
        numbers(inputs["numbers"]),
        lookup(inputs["word"]),
        layers.Flatten()(bins(inputs["numbers"][:, :8])),
        layers.Flatten()(hashed),
    ]
    outputs = layers.Dense(3, name="head")(layers.Dense(16, activation="relu")(layers.Concatenate()(found)))
    given = {"numbers": np.concatenate([x, years], -1), "word": words}
    given["hashed"] = random().integers(10**12, size=(ROWS, 1))
    return compiled(inputs, outputs), (given, y)


class Subclassed(keras.Model):
    """Calls a layer twice."""

    def __init__(self):
        super().__init__(name="net")
        self.first, self.shared = layers.Dense(16, name="first"), layers.Dense(16, name="shared")
        self.drop, self.head = layers.Dropout(0.5, name="drop"), layers.Dense(3, name="head", dtype="float32")

    def call(self, x, training=False):
        x = self.shared(ops.relu(self.shared(self.first(x))))
        return self.head(self.drop(x, training=training))


def subclassed():
    model = Subclassed()
    model.compile(keras.optimizers.Adam(3e-3), cross_entropy())
    return model, rows()


def weighted():
    """Most examples count for nothing."""
    model, (x, y) = mlp()
    return model, (x, y, (random().random(ROWS) < 0.2).astype("float32"))


def accumulating():
    optimizer = keras.optimizers.AdamW(3e-3, gradient_accumulation_steps=4, use_ema=True, global_clipnorm=1.0)
    return of_rows(lambda x: layers.Dense(16, activation="relu")(x), optimizer=optimizer)


def sparse_features():
    """One of 200 features is set, most of the batch's columns are zero, and one column is constant."""
    x = np.eye(200, dtype="float32")[random().integers(200, size=ROWS)]
    x[:, 0] = 7.0
    return of_rows(lambda x: layers.Dense(16, activation="relu")(x), (x, x.argmax(-1).astype("int32") % 3))


def heavy_tails():
    """Features from 10⁻³ to 10³, logarithms of which tell the class."""
    x, y = rows()
    return of_rows(lambda x: layers.Dense(16, activation="relu")(layers.BatchNormalization()(x)), (np.exp(2 * x), y))


def zero_at_the_start():
    """Adapters, layer scales and heads that begin at zero or at a millionth."""

    class Scaled(layers.Layer):
        def __init__(self, start, **options):
            super().__init__(**options)
            self.start = start

        def build(self, shape):
            self.scale = self.add_weight(shape=shape[-1:], initializer=keras.initializers.Constant(self.start))

        def call(self, x):
            return x * self.scale

    def body(x):
        x = layers.Dense(16, activation="relu")(x)
        x = x + layers.Dense(16, kernel_initializer="zeros")(layers.Dense(2)(x))
        return x + Scaled(1e-6)(layers.Dense(16, activation="gelu")(x)) + Scaled(0.0)(layers.Dense(16)(x))

    return of_rows(body)


def large_targets():
    """Prices: the loss is 10⁹, and its gradient beyond float16 unless the scale of the loss goes down."""
    x, _ = rows()
    inputs = keras.Input((8,))
    model = compiled(inputs, layers.Dense(1, name="head")(layers.Dense(16, activation="relu")(inputs)), "mse")
    return model, (x, (x[:, :1] * 3e4 + 1e5).astype("float32"))


class Focal(keras.losses.Loss):
    def call(self, y, logits):
        logits = ops.cast(logits, "float32")
        likelihood = -ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return -((1 - ops.exp(likelihood)) ** 2) * likelihood


def focal():
    return of_rows(lambda x: layers.Dense(16, activation="relu")(x), loss=Focal())


def mixture_of_experts():
    """The best of four experts for each row, times its probability."""

    class Route(layers.Layer):
        def call(self, scores, experts):
            shares = ops.softmax(scores)
            best = ops.one_hot(ops.argmax(shares, -1), 4, dtype=shares.dtype)
            return ops.sum(experts * (shares * best)[..., None], 1)

    def body(x):
        experts = layers.Reshape((4, 16))(layers.Dense(64, activation="relu")(x))
        return layers.Dense(16, activation="relu")(Route()(layers.Dense(4)(x), experts))

    return of_rows(body)


def quantised_codes():
    """The nearest of eight codes, with the gradient passed straight through."""

    class Codes(layers.Layer):
        def build(self, shape):
            self.codes = self.add_weight(shape=(8, shape[-1]), initializer="glorot_uniform", trainable=False)

        def call(self, x):
            distance = ops.sum((x[:, None] - self.codes) ** 2, -1)
            code = ops.take(ops.cast(self.codes, x.dtype), ops.argmin(distance, -1), 0)
            return x + ops.stop_gradient(code - x)

    return of_rows(lambda x: layers.Dense(16, activation="relu")(Codes()(layers.Dense(8)(x))))


def binarised():
    """Signs forward, the identity backward."""

    class Sign(layers.Layer):
        def call(self, x):
            return x + ops.stop_gradient(ops.sign(x) - x)

    return of_rows(lambda x: layers.Dense(16, activation="relu")(Sign()(layers.Dense(32)(x))))


def dead_units():
    """All zero behind this activation."""

    def body(x):
        dead = layers.Dense(16, activation="relu", bias_initializer=keras.initializers.Constant(-50.0), name="dead")(x)
        return layers.Concatenate()([dead, layers.Dense(16, activation="relu")(x)])

    return of_rows(body)


HEALTHY = (
    mlp, deep_mlp, activations, noisy, noise_of_its_dtype, stochastic_depth, autoencoder, variational, siamese,
    several, tabular, subclassed, weighted, accumulating, sparse_features, heavy_tails, zero_at_the_start,
    large_targets, focal, mixture_of_experts, quantised_codes, binarised, dead_units,
)  # fmt: skip
