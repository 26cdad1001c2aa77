"""Gradients that a CPU sums in 16 bits: what is named, what XLA mends, and what the optimizer makes up for."""

import keras
import pytest
import tensorflow as tf
from precision_matrix.gradients import PARTS, learned_by

from tfopt.precision import check
from tfopt.precision.gate.graph import in_float32, right_with_xla, sums_of


def summed(dtype):
    """Ones, summed in a dtype and cast, as a bias's gradient is: the graph, the sum, and what is found of it."""
    graph = tf.Graph()
    with graph.as_default():
        total = tf.raw_ops.BiasAddGrad(out_backprop=tf.ones([4096, 2], dtype))
        return graph, total, sums_of(tf.reshape(tf.cast(total, tf.float32), [1, -1]) / 8.0)


def test_the_same_sum_in_float32():
    graph, total, [found] = summed(tf.bfloat16)
    with graph.as_default():
        both = [tf.cast(total, tf.float32), in_float32(found)]
    with tf.compat.v1.Session(graph=graph) as session:
        stock, exact = session.run(both)
    assert exact.tolist() == [4096.0, 4096.0]
    assert stock.tolist() == [256.0, 256.0]  # on a CPU


def test_a_sum_in_float32_is_not_one_in_16_bits():
    assert summed(tf.float32)[2] == []


def test_xla_sums_correctly():
    assert right_with_xla(summed(tf.bfloat16)[2][0])


def placed(*shapes):
    return [tf.compat.v1.placeholder(tf.bfloat16, shape) for shape in shapes]


def test_no_gigabytes_are_made_to_ask_xla(monkeypatch):
    with tf.Graph().as_default():
        total = tf.raw_ops.BiasAddGrad(out_backprop=placed([None, 224, 224, 64])[0])
    monkeypatch.setattr(tf, "ones", lambda shape, _: pytest.fail(f"made {shape}"))
    assert not right_with_xla(total.op)


def test_of_a_sum_that_does_not_run_on_ones_nothing_is_known():
    """Strides of 2 make the sizes differ, which the graph does not know."""
    with tf.Graph().as_default():
        x, y = placed([1, None, None, 1], [1, None, None, 1])
        sizes = {"filter_sizes": [3, 3, 1, 1], "strides": [1, 2, 2, 1], "padding": "SAME"}
        total = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(input=x, out_backprop=y, **sizes)
    assert not right_with_xla(total.op)


class Shortens(keras.layers.Layer):
    """Computes a product whose gradient, in bfloat16, is 30 % of the right one, and no sum."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")

    def call(self, x):
        share = 0.3 if x.dtype == tf.bfloat16 else 1.0

        @tf.custom_gradient
        def product(x, kernel):
            return x @ kernel, lambda upper: (upper @ tf.transpose(kernel), share * (tf.transpose(x) @ upper))

        return product(x, tf.convert_to_tensor(self.kernel))


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_xla_mends_no_gradient_that_is_no_sum(jit_compile):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), Shortens(name="part"), keras.layers.Dense(1, dtype="float32")])
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=jit_compile)
    report = check(model, (tf.ones([8, 4]), tf.ones([8, 1])), "mixed_bfloat16")
    assert report.problems[0].startswith("The gradient of 'part/kernel' loses")
    assert "it is computed in bfloat16" in report.problems[0]
    assert not any("XLA" in note for note in report.notes)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_model_is_judged_as_it_is_compiled(jit_compile):
    """The loss is 3.2 after 20 steps without XLA, and 0.08 in float32."""
    model, data = learned_by(*PARTS["Dense on a sequence"])()
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=jit_compile)
    report = check(model, data, "mixed_bfloat16")
    assert report.passed == jit_compile
    assert any("sums" in note and "gradients correctly" in note for note in report.notes)
    if not jit_compile:
        assert report.problems[0].startswith("The gradient of 'part/bias' loses 91")


@pytest.mark.slow
def test_what_adam_hides_is_said():
    model, data = learned_by(*PARTS["Dense on a sequence"])()
    model.compile(keras.optimizers.Adam(0.05), "mse", jit_compile=False)
    report = check(model, data, "mixed_bfloat16")
    assert report.passed
    assert any("loses a part of the gradient of" in note for note in report.notes), report.notes
