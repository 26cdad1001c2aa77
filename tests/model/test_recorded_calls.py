import keras
import pytest
import tensorflow as tf
from precision_nets import X, functional, lstm

from tfopt.model.layers import recorded_calls

layers = keras.layers


def noted(model, x):
    """The names of the layers whose calls were noted, with the shapes that came out."""
    found = []

    def run(x):
        with recorded_calls(model) as calls:
            model(x, training=True)
        found.extend((call.layer.name, [tuple(out.shape) for out in call.outputs]) for call in calls)

    tf.function(run, autograph=False).get_concrete_function(tf.constant(x))
    return found


def test_calls_come_in_order_and_shared_layers_twice():
    shared = layers.Dense(8, name="shared")
    model = functional(lambda x: layers.Dense(3, name="head")(shared(layers.ReLU(name="relu")(shared(x)))))
    assert noted(model, X) == [("shared", [(32, 8)]), ("relu", [(32, 8)]), ("shared", [(32, 8)]), ("head", [(32, 3)])]


def test_a_model_has_a_call_of_its_own_only_where_it_computes_something():
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="inside")], name="inner")
    model = functional(lambda x: inner(x))
    assert [name for name, _ in noted(model, X)] == ["inside"]
    model = functional(lambda x: inner(x) * 2.0)
    assert [name for name, _ in noted(model, X)] == ["inside", "net"]


def test_what_runs_in_a_loop_is_left_out():
    model, (x, _) = lstm()
    names = [name for name, _ in noted(model, x)]
    assert names.count("lstm_cell") <= 1  # Keras calls it once outside, to learn the shapes
    assert names[-2:] == [model.layers[0].name, model.layers[1].name]


class Odd(layers.Layer):
    def call(self, x):
        return {"a": (x * 2, [tf.shape(x), None]), "b": tf.argmax(x, axis=-1)}


class Block(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.odd = Odd(name="odd")

    def call(self, x):
        return self.odd(x)["a"][0]


def test_nested_whole_and_missing_outputs():
    model = functional(lambda x: layers.Dense(3, name="head")(Block(name="block")(x)))
    assert noted(model, X) == [("odd", [(32, 8)]), ("block", [(32, 8)]), ("head", [(32, 3)])]


def test_layers_come_back_as_they_were_whatever_happens_inside():
    model = functional(lambda x: layers.Dense(3, name="head")(x))
    head = model.get_layer("head")

    def own(x):
        return layers.Dense.call(head, x)

    head.__dict__["call"] = own
    before = [dict(layer.__dict__) for layer in model._flatten_layers()]
    hooked = []

    def inside():
        with recorded_calls(model):
            hooked.append(head.call)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        inside()
    assert hooked[0] is not own
    assert head.call is own
    assert [dict(layer.__dict__) for layer in model._flatten_layers()] == before
