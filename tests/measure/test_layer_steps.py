import keras
import numpy as np

from tfopt.measure.layer_steps import outputs, outputs_and_gradients
from tfopt.model.step_calls import StepCalls


def test_the_backward_pass_starts_from_gradients_that_are_not_constant():
    layers = keras.layers
    stack = [keras.Input((3,)), layers.Dense(4, name="first"), layers.Dense(2, name="last")]
    model = keras.Sequential(stack)
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
    first, last = StepCalls(model, (x, np.zeros((5, 2), "float32"))).calls
    kernel, bias = (weight.numpy() for weight in last.layer.weights)
    hidden = first.layer(x).numpy()
    made = hidden @ kernel + bias
    (found,) = outputs([last], [last.tensors])
    np.testing.assert_allclose(found, made, rtol=1e-5, atol=1e-6)
    again, *gradients = outputs_and_gradients([last], [last.tensors])
    np.testing.assert_allclose(again, made, rtol=1e-5, atol=1e-6)
    for gradient, expected in zip(gradients, (made @ kernel.T, hidden.T @ made, made.sum(0)), strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-5)
    assert len(outputs_and_gradients([first], [first.tensors])) == 3  # the data have no gradient
