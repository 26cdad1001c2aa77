"""Functions in the place of single layers' methods."""

import keras
import pytest
import tensorflow as tf
from models import small_net

from tfopt.errors import UnsupportedError
from tfopt.kernels import LayerPath, undo
from tfopt.kernels.replacing import renew, replace, replacement


def doubled(layer):
    return lambda inputs, training=None: 2 * type(layer).call(layer, inputs)


@pytest.fixture
def model():
    return keras.Sequential([keras.Input((2,)), keras.layers.ReLU(), keras.Sequential([keras.layers.ReLU()])])


def test_one_layer_changes_and_changes_back(model):
    first, second = model.layers[0], model.layers[1].layers[0]
    function = doubled(second)
    replace(second, "call", function)
    assert replacement(second, "call") is function
    assert replacement(first, "call") is None
    assert model(tf.ones((1, 2))).numpy().tolist() == [[2.0, 2.0]]
    assert undo(model) == 1
    assert model(tf.ones((1, 2))).numpy().tolist() == [[1.0, 1.0]]
    assert not {"call", "_tfopt_replaced"} & vars(second).keys()
    assert undo(model) == 0


def test_two_methods_of_a_layer_come_back_together(model):
    layer = model.layers[0]
    replace(layer, "call", doubled(layer))
    replace(layer, "compute_output_shape", lambda shape: shape)
    assert undo(model) == 1
    assert layer.call == type(layer).call.__get__(layer)


def test_a_patch_on_top_is_left_alone(model):
    first, second = model.layers[0], model.layers[1].layers[0]
    for layer in (first, second):
        replace(layer, "call", doubled(layer))
    mine = doubled(second)
    second.call = mine
    with pytest.raises(UnsupportedError, match=r"'call' of layer .*re_lu.* Remove that patch first"):
        undo(model)
    assert second.call is mine
    assert replacement(first, "call") is first.call


def test_step_functions_are_made_anew_where_there_are_any():
    model = small_net()
    renew(model)
    assert model.train_function is None
    model.make_train_function()
    model.make_predict_function()
    before = model.train_function, model.predict_function
    renew(model)
    assert model.train_function not in (None, before[0])
    assert model.predict_function not in (None, before[1])
    assert model.test_function is None


def test_those_of_a_model_inside_too(model):
    inside = model.layers[1]
    inside.make_predict_function()
    before = inside.predict_function
    renew(model)
    assert inside.predict_function is not before


@pytest.mark.parametrize(
    ("training", "inference", "text"),
    [
        ((), (), "a/b: fast"),
        (("no GPU", "float32"), ("no GPU", "float32"), "a/b: plain (no GPU, float32)"),
        (("dropout",), (), "a/b: training plain (dropout); inference fast"),
        ((), None, "a/b: training fast; inference fast if a step's shapes and masks allow (not traced yet)"),
    ],
)
def test_it_reads_well(training, inference, text):
    row = LayerPath(layer="a/b", kernel="fast", training=training, inference=inference)
    assert str(row) == text
    assert row.to_dict()["training"] == training


class Maker(keras.Model):
    """A model with a maker of its own, which takes no `force`."""

    def __init__(self):
        super().__init__()
        self.relu = keras.layers.ReLU()

    def call(self, inputs):
        return self.relu(inputs)

    def make_predict_function(self):
        return super().make_predict_function()


def test_a_maker_of_ones_own_need_not_take_force():
    model = Maker()
    model.predict(tf.ones((2, 2)), verbose=0)
    replace(model.relu, "call", doubled(model.relu))
    renew(model)
    assert model.predict(tf.ones((1, 2)), verbose=0).tolist() == [[2.0, 2.0]]
