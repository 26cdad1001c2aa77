"""Small nets for the precision gate: healthy ones, and ones with a planted fault of precision."""

import keras
import numpy as np

layers = keras.layers
_random = np.random.default_rng(0)
X = _random.normal(size=(32, 8)).astype("float32")
Y = _random.integers(3, size=32).astype("int32")
TOKENS = _random.integers(20, size=(8, 6)).astype("int32")


def functional(body, *, name="net", loss=None, **options):
    """A classifier of `X` into three classes, from a function of a symbolic tensor."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    model = keras.Model(inputs, body(inputs), name=name)
    model.compile(options.pop("optimizer", "adam"), loss or cross_entropy(), **options)
    return model


def cross_entropy(from_logits=True):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)


def mlp():
    def body(x):
        for _ in range(3):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Dense(16)(x)))
        return layers.Dense(3)(x)

    return functional(body), (X, Y)


def transformer():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16)(inputs)
    normed = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normed, normed)
    normed = layers.LayerNormalization()(x)
    x = layers.Add()([x, layers.Dense(16)(layers.Dense(32, activation="gelu")(normed))])
    model = keras.Model(inputs, layers.Dense(20)(x))
    model.compile("adam", cross_entropy())
    return model, (TOKENS, TOKENS)


def lstm():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4, 2)), layers.LSTM(8, dropout=0.1), layers.Dense(3)])
    model.compile("adam", cross_entropy())
    return model, (X.reshape(32, 4, 2), Y)


def overflowing():
    """Values reach 10⁵ after "loud", beyond float16's 65504, and are scaled back by "quiet"."""

    def body(x):
        x = layers.Dense(16, activation="relu", name="first")(x)
        x = layers.Rescaling(1e-5, name="quiet")(layers.Rescaling(1e5, name="loud")(x))
        return layers.Dense(3, name="head")(layers.Dense(16, name="second")(x))

    return functional(body)


def underflowing():
    """The gradient of "branch" is 10⁻¹³ of the others: zero in float16, even when scaled by 2¹⁵."""

    def body(x):
        branch = layers.Rescaling(1e-13, name="tiny")(layers.Dense(16, name="branch")(x))
        return layers.Dense(3, name="head")(layers.Add(name="add")([branch, layers.Dense(16, name="main")(x)]))

    return functional(body)


def with_head(policy):
    """A net of one policy throughout, its softmax included."""

    def body(x):
        x = layers.Dense(8, dtype=policy, name="body")(x)
        return layers.Dense(3, activation="softmax", dtype=policy, name="head")(x)

    return functional(body, loss=cross_entropy(from_logits=False))


def with_late_cast(policy):
    """The softmax is of 16 bits; only a layer after it, which changes nothing, is of 32."""

    def body(x):
        x = layers.Softmax(dtype=policy, name="probabilities")(layers.Dense(3, dtype=policy, name="logits")(x))
        return layers.Activation("linear", dtype="float32", name="cast")(x)

    return functional(body, loss=cross_entropy(from_logits=False))
