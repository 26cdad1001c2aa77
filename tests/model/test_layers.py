import keras
import numpy as np
import pytest
from models import WithoutCall

from tfopt.errors import UnsupportedError
from tfopt.model.layers import is_built, is_keras_own, output_layers
from tfopt.precision import apply

layers = keras.layers
X = np.ones((2, 4), "float32")


def found(model):
    return {layer.name for layer in output_layers(model)}


def functional(build):
    inputs = keras.Input((4,))
    return keras.Model(inputs, build(inputs))


def dense(name):
    return layers.Dense(4, name=name)


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda x: dense("b")(dense("a")(x)), {"b"}),
        (lambda x: layers.Softmax(name="s")(dense("a")(x)), {"s"}),
        (lambda x: keras.ops.softmax(dense("b")(dense("a")(x)) + 1.0), {"b"}),
        (lambda x: layers.Reshape((2, 2), name="r")(dense("a")(x)), {"r", "a"}),
        (lambda x: layers.Concatenate(name="c")([dense("a")(x), dense("b")(x)]), {"c", "a", "b"}),
        (lambda x: {"one": dense("a")(x), "two": keras.ops.argmax(dense("b")(dense("c")(x)))}, {"a", "b"}),
        (lambda x: keras.Sequential([dense("a"), dense("b")], name="nested")(dense("c")(x)), {"b"}),
        (lambda x: layers.Activation("relu", name="t")(functional(lambda y: [dense("a")(y), y])(x)[0]), {"t"}),
        (lambda x: functional(lambda y: [dense("a")(y), dense("b")(y)])(x)[1], {"b"}),
        (lambda x: layers.LSTM(3, name="rnn")(layers.Reshape((2, 2))(x)), {"rnn", "lstm_cell"}),
    ],
)
def test_of_a_graph(build, names):
    assert found(functional(build)) == names


def test_of_a_sequential_model_before_it_is_built():
    model = keras.Sequential([dense("a"), dense("b"), layers.Reshape((2, 2), name="r")])
    assert found(model) == {"r", "b"}
    model(X)
    assert found(model) == {"r", "b"}


class Block(keras.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.norm = dense("inner"), layers.BatchNormalization(name="norm")

    def call(self, inputs):
        return keras.ops.relu(self.norm(self.inner(inputs)))


class Weighted(Block):
    """It computes with a weight of its own, so that all of it makes the output."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, inputs):
        return super().call(inputs) * self.scale


class Subclassed(keras.Model):
    def __init__(self, last):
        super().__init__()
        self.first, self.last = dense("first"), last

    def call(self, inputs, training=False):
        x = keras.ops.relu(self.first(inputs))
        return {"out": keras.ops.softmax(self.last(x)), "again": keras.ops.reshape(self.last(x), (-1,))}


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: dense("head"), {"head"}),
        (lambda: Block(name="block"), {"norm"}),
        (lambda: Weighted(name="block"), {"block", "inner", "norm"}),
        (lambda: keras.Sequential([dense("a"), dense("b")]), {"b"}),
        # It puts out the very tensor that it takes in.
        (lambda: keras.Sequential([dense("a"), layers.Identity(name="same")]), {"a", "same"}),
    ],
)
def test_of_a_subclassed_model(make, names):
    model = Subclassed(make())
    model(X)
    calls = [layer.__dict__.get("call") for layer in model._flatten_layers()]
    weights = [variable.numpy().tobytes() for variable in model.variables]
    assert found(model) == names
    assert model.losses == []
    assert [layer.__dict__.get("call") for layer in model._flatten_layers()] == calls
    assert [variable.numpy().tobytes() for variable in model.variables] == weights
    assert found(functional(model)) == names


def test_of_a_quantized_head():
    model = Subclassed(dense("head"))
    model(X)
    apply(model, {"head": "float8"})
    assert found(model) == {"head"}


class Ids(keras.Model):
    """Of integers; its inputs are several."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = layers.Embedding(9, 4), dense("head")

    def call(self, inputs, mask=None):
        return self.head(keras.ops.mean(self.embedding(inputs["a"]) + self.embedding(inputs["b"]), axis=1))


def test_of_a_subclassed_model_of_integers():
    model = Ids()
    model({"a": X.astype("int32"), "b": X.astype("int32")})
    assert found(model) == {"head"}


def test_of_a_subclassed_model_that_was_never_called():
    with pytest.raises(
        UnsupportedError, match=r"has not been called on data yet\. What to do: call it on a batch first"
    ):
        output_layers(Subclassed(dense("head")))


class Eager(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = dense("head")

    def call(self, inputs):
        return self.head(inputs) * float(np.sum(inputs))


def test_of_a_subclassed_model_that_does_not_trace():
    model = Eager()
    model(X)
    with pytest.raises(UnsupportedError, match=r"cannot be traced .* names each layer to change"):
        output_layers(model)


class Own(keras.layers.Dense):
    pass


def test_a_subclass_of_the_users_is_none_of_keras():
    assert is_keras_own(keras.layers.Dense(1))
    assert is_keras_own(keras.Sequential())
    assert not is_keras_own(Own(1))


def test_a_model_without_a_call_is_built_if_its_networks_are():
    assert is_built(WithoutCall())
    assert not is_built(WithoutCall(built=False))
    assert not is_built(keras.Model())
    assert not is_built(keras.Sequential([dense("a")]))
