"""Nets whose fault is where values go rather than what is computed: ids, heads, ranges, state and what is refused."""

import keras
import numpy as np
import tensorflow as tf

from precision_matrix.image_nets import images
from precision_matrix.nets import ROWS, compiled, cross_entropy, mlp, of_rows, random, rows

layers, ops = keras.layers, keras.ops


def ids(vocabulary, dtype):
    """Sequences of ids, and which half of the vocabulary most of them are in."""
    x = random().integers(vocabulary, size=(ROWS, 8))
    return x.astype(dtype), (np.median(x, -1) > vocabulary / 2).astype("int32")


def looked_up(model, x):
    """The ids that the model's embedding gets for a batch."""
    [embedding] = [layer for layer in model._flatten_layers() if isinstance(layer, layers.Embedding)]
    found, call = [], embedding.call
    embedding.call = lambda inputs: found.append(ops.convert_to_numpy(ops.cast(inputs, "int32"))) or call(inputs)
    try:
        model(x, training=True)
    finally:
        del embedding.call
    return found[0]


def share_of_wrong_ids(model, x):
    return float((looked_up(model, x) != np.asarray(x).astype("int64")).mean())


def ids_without_an_input(vocabulary, dtype="int32"):
    """Keras gives the input that it adds the dtype of the first layer."""

    def make():
        x, y = ids(vocabulary, dtype)
        parts = [layers.Embedding(vocabulary + 16, 8), layers.GlobalAveragePooling1D()]
        model = keras.Sequential([*parts, layers.Dense(3, name="head", dtype="float32")], name="net")
        model.compile("adam", cross_entropy())
        model.build((None, 8))
        return model, (x, y)

    return make


def ids_with_an_input(vocabulary, dtype):
    """An embedding takes floating-point ids as they come."""

    def make():
        data = ids(vocabulary, dtype)
        return of_rows(
            lambda x: layers.GlobalAveragePooling1D()(layers.Embedding(vocabulary + 16, 8, name="tokens")(x)), data
        )

    return make


def ids_reshaped(vocabulary, dtype):
    """The embedding casts nothing, and the layer before it does."""

    def make():
        tokens = layers.Embedding(vocabulary + 16, 8, name="tokens")
        return of_rows(
            lambda x: layers.GlobalAveragePooling1D()(tokens(layers.Reshape((8,), name="flat")(x))),
            ids(vocabulary, dtype),
        )

    return make


class Reads(keras.Model):
    """A model's own call casts what it gets, as a layer's does."""

    def __init__(self, vocabulary):
        super().__init__(name="net")
        self.tokens = layers.Embedding(vocabulary + 16, 8, name="tokens")
        self.body, self.head = layers.Dense(8, name="body"), layers.Dense(3, name="head", dtype="float32")

    def call(self, x):
        return self.head(self.body(ops.mean(self.tokens(ops.cast(x, "int32")), 1)))


def ids_into_a_subclassed_model(vocabulary, dtype):
    def make():
        x, y = ids(vocabulary, dtype)
        model = Reads(vocabulary)
        model.compile("adam", cross_entropy())
        model(x[:1])
        return model, (x, y)

    return make


def of_output(body, loss=None, classes=3):
    """A net whose body makes the outputs."""

    def make():
        x, y = rows()
        inputs = keras.Input((8,))
        outputs = body(layers.Dense(16, activation="relu", name="body")(inputs))
        if outputs.shape[-1] == 1:
            return compiled(inputs, outputs, loss or keras.losses.BinaryCrossentropy()), (x, (y > 0)[:, None] * 1.0)
        return compiled(inputs, outputs, loss or keras.losses.SparseCategoricalCrossentropy()), (x, y)

    return make


def _cast(x):
    return layers.Activation("linear", dtype="float32", name="cast")(x)


def _logits(x, units=3, **options):
    return layers.Dense(units, name="logits", **options)(x)


LATE = {
    "softmax of 16 bits, cast afterwards": of_output(
        lambda x: _cast(layers.Softmax(name="probabilities")(_logits(x)))
    ),
    "softmax by operation": of_output(lambda x: _cast(ops.softmax(_logits(x)))),
    "softmax by an activation": of_output(lambda x: _cast(_logits(x, activation="softmax"))),
    "softmax by an activation's function": of_output(lambda x: _cast(_logits(x, activation=ops.softmax))),
    "logarithm of a softmax by operation": of_output(
        lambda x: _cast(ops.log(ops.softmax(_logits(x)))), cross_entropy()
    ),
    "sigmoid by an activation": of_output(lambda x: _cast(_logits(x, 1, activation="sigmoid"))),
    "sigmoid by operation": of_output(lambda x: _cast(ops.sigmoid(_logits(x, 1)))),
    "sigmoid by operation, cast by one": of_output(lambda x: ops.cast(ops.sigmoid(_logits(x, 1)), "float32")),
    "softmax, reshaped, then scaled in float32": of_output(
        lambda x: layers.Rescaling(1.0, dtype="float32", name="cast")(
            layers.Reshape((3,))(layers.Softmax(name="probabilities")(_logits(x)))
        )
    ),
    "mean of two softmaxes": of_output(
        lambda x: layers.Average(dtype="float32", name="cast")(
            [layers.Softmax(name="one")(_logits(x)), layers.Dense(3, activation="softmax", name="two")(x)]
        )
    ),
    "softmax in a lambda": of_output(
        lambda x: _cast(layers.Lambda(tf.nn.softmax, name="probabilities", output_shape=(3,))(_logits(x)))
    ),
}  # fmt: skip

LOGITS = {
    "logits of 16 bits, softmax in float32": of_output(
        lambda x: layers.Activation("softmax", dtype="float32", name="head")(_logits(x))
    ),
    "softmax as a gate": of_output(
        lambda x: layers.Dense(3, name="head", dtype="float32")(x * layers.Dense(16, activation="softmax")(x)),
        cross_entropy(),
    ),
    "sigmoid as a gate": of_output(
        lambda x: layers.Dense(3, name="head", dtype="float32")(x * ops.sigmoid(layers.Dense(16)(x))), cross_entropy()
    ),
}

HEADS = {
    "logits of 16 bits": of_output(_logits, cross_entropy()),
    "softmax of 16 bits": of_output(lambda x: _logits(x, activation="softmax")),
    "logits of 16 bits by an operation": of_output(lambda x: _logits(x) * 2.0, cross_entropy()),
}


def loud(value):
    """Values reach `value` and are scaled back."""

    def body(x):
        x = layers.Dense(16, activation="relu")(x)
        return layers.Rescaling(1 / value, name="quiet")(layers.Rescaling(value, name="loud")(x))

    return lambda: of_rows(body)


def loud_weights():
    """As after a training that let them grow."""
    model, data = of_rows(lambda x: layers.Dense(4, name="down")(layers.Dense(16, activation="relu", name="up")(x)))
    model.get_layer("up").kernel.assign(model.get_layer("up").kernel * 1e5)
    model.get_layer("down").kernel.assign(model.get_layer("down").kernel * 1e-5)
    return model, data


def faint_branch(factor):
    """A branch of which the gradient is `factor` of the others'."""

    def body(x):
        return layers.Add()([layers.Rescaling(factor)(layers.Dense(16, name="branch")(x)), layers.Dense(16)(x)])

    return lambda: of_rows(body)


class Averaged(layers.Layer):
    """Subtracts an exponential moving average, which Keras' autocasting hands out in the compute dtype."""

    def __init__(self, momentum, autocast, **options):
        super().__init__(**options)
        self.momentum, self.cast = momentum, autocast

    def build(self, shape):
        options = {} if self.cast else {"autocast": False}
        self.average = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False, name="average", **options)

    def call(self, x, training=False):
        if training:
            mean = ops.cast(ops.mean(x, 0), self.average.dtype if not self.cast else x.dtype)
            self.average.assign(self.average * self.momentum + mean * (1 - self.momentum))
        return x - ops.cast(self.average, x.dtype)


def moving_average(momentum, *, autocast):
    return lambda: of_rows(lambda x: layers.Dense(16, "relu")(Averaged(momentum, autocast, name="averaged")(x)))


def one_more(count, x):
    return count + 1


class Counting(layers.Layer):
    """Counts steps, and warms up by them."""

    def __init__(self, start, dtype_of_count, update, autocast, **options):
        super().__init__(**options)
        self.start, self.of, self.update, self.cast = start, dtype_of_count, update, autocast

    def build(self, shape):
        options = {"dtype": self.of, "autocast": self.cast, "trainable": False}
        self.count = self.add_weight(
            shape=(), initializer=keras.initializers.Constant(self.start), name="count", **options
        )

    def call(self, x, training=False):
        if training:
            self.count.assign(self.update(self.count, x))
        return x * (1 - ops.exp(-ops.cast(self.count, x.dtype) / 10))


def counter(start, dtype="float32", update=one_more, autocast=True):
    return lambda: of_rows(
        lambda x: layers.Dense(16, "relu")(Counting(start, dtype, update, autocast, name="counting")(x))
    )


SUMS = {
    "counter": one_more,
    "counter up to 10,000": lambda count, x: ops.minimum(count + 1, 10_000),
    "sum of magnitudes": lambda count, x: count + ops.mean(ops.abs(x)),
}
"""Updates of a state of float32 that 16 bits stop after hundreds or thousands of steps."""
NO_SUMS = {
    "counter from 0 to 99": lambda count, x: ops.mod(count + 1, 100),
    "mean of the batch": lambda count, x: ops.mean(ops.abs(x)),
    "short moving average": lambda count, x: 0.9 * count + 0.1 * ops.mean(ops.abs(x)),
}
"""Those that they do not."""


class OneHalf(layers.Layer):
    """Its scale is of 16 bits if the model is made under a mixed policy."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones", name="scale", dtype=self.compute_dtype)

    def call(self, x):
        return x * ops.cast(self.scale, x.dtype)


def one_half():
    return of_rows(lambda x: layers.Dense(16, "relu")(OneHalf(name="half")(layers.Dense(8)(x))))


class RootOfSquares(layers.Layer):
    """Where its input is zero, float16 loses the 1e-12 that keeps the root's gradient finite."""

    def call(self, x):
        return ops.sqrt(x**2 + 1e-12)


def root_of_squares():
    return of_rows(lambda x: RootOfSquares(name="root")(layers.Dense(16, activation="relu")(x)))


class Days(layers.Layer):
    """Takes whole seconds, and casts them itself."""

    def call(self, x):
        return (ops.cast(x, self.compute_dtype) - 1.6e9) / 86400.0


def seconds_as_integers():
    x = (1.6e9 + random().uniform(0, 5e5, size=(ROWS, 4))).astype("int64")
    data = x, (x[:, 0] > 1.6e9 + 2.5e5).astype("int32")
    return of_rows(lambda x: layers.Dense(16, activation="relu")(Days(name="days")(x)), data)


def years_and(normalise):
    """A column of years, and a layer that is to bring them to about 1."""

    def make():
        x = random().integers(2004, 2027, size=(ROWS, 1)).astype("float32")
        layer = normalise()
        if isinstance(layer, layers.Normalization):
            layer.adapt(x)
        data = x, (x[:, 0] > 2015).astype("int32")
        return of_rows(lambda x: layers.Dense(16, activation="relu")(layer(x)), data)

    return make


def years_into_buckets():
    """In a graph, preprocessing layers cast what they get; outside of one, they do not."""
    return years_and(lambda: layers.Discretization([2005.0, 2010.0, 2015.0, 2020.0], output_mode="one_hot"))()


def converged():
    """The loss is nearly zero, and so is what rounding can do to it."""
    model, data = mlp()
    model.compile(keras.optimizers.Adam(1e-2), cross_entropy(), jit_compile=False)
    model.fit(*data, epochs=60, verbose=0)
    return model, data


class Factorised(layers.Layer):
    def call(self, x):
        return ops.reshape(ops.cholesky(ops.matmul(x[:, :, None], x[:, None]) + ops.eye(8, dtype=x.dtype)), (-1, 64))


class Penalised(layers.Layer):
    def call(self, x):
        self.add_loss(ops.mean(x**2))
        return x


def factorised():
    return of_rows(lambda x: layers.Dense(16)(Factorised(name="factorised")(x)))


def penalised():
    return of_rows(lambda x: layers.Dense(16)(Penalised(name="penalised")(layers.Dense(8)(x))))


def not_finite():
    model, (x, y) = mlp()
    return model, (np.where(x > 1.5, np.nan, x).astype("float32"), y)


def diverged():
    model, data = mlp()
    model.layers[1].kernel.assign(np.full(model.layers[1].kernel.shape, np.nan))
    return model, data


def without_products():
    """Nothing to quantize."""
    return of_rows(lambda x: layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3)(x)), images(), classes=4)


def trained(make, epochs=6):
    """After some epochs."""

    def build():
        model, data = make()
        model.fit(*data[:2], epochs=epochs, verbose=0)
        return model, data

    return build
