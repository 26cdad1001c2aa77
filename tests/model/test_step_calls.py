import keras
import numpy as np

from tfopt.model.step_calls import StepCalls, kind_of

layers = keras.layers


class Block(layers.Layer):
    def __init__(self, units=4):
        super().__init__()
        self.each = layers.TimeDistributed(layers.Dense(units))
        self.stack = keras.Sequential([keras.Input((3, 4)), layers.Dense(6), layers.Dense(units, activation="relu")])

    def call(self, inputs):
        return self.stack(self.each(inputs))


def kinds(*stack):
    model = keras.Sequential([keras.Input((3, 4)), *stack])
    model.compile("sgd", "mse")
    calls = StepCalls(model, (np.zeros((2, 3, 4), "float32"), np.zeros((2, 3, 4), "float32"))).calls
    return [kind_of(call.layer, [call]) for call in calls]


def test_layers_that_differ_in_names_are_alike():
    first, second, third = kinds(Block(), Block(), Block())  # the data have no gradient
    assert first != second == third


def test_layers_that_compute_otherwise_are_not_alike():
    unlike = Block()
    unlike.stack.layers[1].activation = keras.activations.tanh
    bfloat16 = layers.TimeDistributed(layers.Dense(4, dtype="bfloat16"))
    found = kinds(Block(), Block(), unlike, bfloat16, layers.TimeDistributed(layers.Dense(4)))
    assert len(set(found)) == len(found)
