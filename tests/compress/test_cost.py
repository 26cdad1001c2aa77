from dataclasses import replace

import keras
import pytest
import tensorflow as tf

from tfopt.compress import cost, costing
from tfopt.measure import StepTimes

layers, ops = keras.layers, keras.ops
BATCH = 3
TIMES = StepTimes(repeats_ms=((2.0,),), steps_per_sample=1, first_step_seconds=0.0)


@pytest.fixture
def quick(monkeypatch):
    """Layers take 2 ms forward and 2 ms with the backward pass, a step 30 ms; 1 TFLOP/s and 1 GiB/s."""
    monkeypatch.setattr(costing, "BlockTimer", lambda step: lambda: TIMES)
    monkeypatch.setattr(costing, "StepTimer", lambda *_: lambda *_, **__: replace(TIMES, repeats_ms=((30.0,),)))
    monkeypatch.setattr(costing, "matmul_tflops", lambda dtype: 1.0)
    monkeypatch.setattr(costing, "copy_gib_per_second", lambda: 1.0)


def compiled(model, **options):
    model.compile("sgd", lambda _, output: ops.mean(ops.cast(output, "float32")), **options)
    return model


def batch(*shapes, dtype="float32"):
    inputs = tuple(tf.zeros((BATCH, *shape), dtype) for shape in shapes)
    return (inputs if inputs[1:] else inputs[0]), tf.zeros(BATCH)


def alone(layer, *shapes, dtype="float32"):
    """The cost of a layer whose inputs, where they are floats, have a gradient."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    before = [layers.PReLU()(one) if dtype == "float32" else one for one in inputs]
    model = compiled(keras.Model(inputs, layer(before if len(before) > 1 else before[0])))
    return cost(model, batch(*shapes, dtype=dtype)).layers[-1]


class Attend(layers.Layer):
    """Calls an attention layer on two inputs, as no Sequential model can."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, inputs):
        return self.attention(inputs[0], inputs[1])


def attention(layer, *shapes):
    return Attend(layer), *shapes


# A layer, the shapes of its inputs, its multiply-adds forward on one example, and its parameters, all by hand.
BY_HAND = [
    (layers.Dense(5), [(7, 4)], 7 * 4 * 5, 4 * 5 + 5),
    (layers.EinsumDense("abc,cde->abde", (None, 2, 5), bias_axes="de"), [(7, 4)], 7 * 4 * 10, 4 * 10 + 10),
    (layers.Conv1D(6, 3), [(8, 4)], 6 * 3 * 4 * 6, 3 * 4 * 6 + 6),
    (layers.Conv2D(6, 3, strides=2, padding="same"), [(8, 8, 4)], 16 * 9 * 4 * 6, 9 * 4 * 6 + 6),
    (layers.Conv2D(6, 3, groups=2, use_bias=False), [(8, 8, 4)], 36 * 9 * 2 * 6, 9 * 2 * 6),
    (layers.Conv3D(2, 3), [(4, 5, 6, 3)], 2 * 3 * 4 * 27 * 3 * 2, 27 * 3 * 2 + 2),
    (layers.Conv1DTranspose(6, 3, strides=2), [(8, 4)], 8 * 3 * 4 * 6, 3 * 4 * 6 + 6),
    (layers.Conv2DTranspose(6, 3), [(8, 8, 4)], 64 * 9 * 4 * 6, 9 * 4 * 6 + 6),
    (layers.Conv3DTranspose(2, 2), [(3, 4, 5, 3)], 60 * 8 * 3 * 2, 8 * 3 * 2 + 2),
    (layers.DepthwiseConv1D(3, depth_multiplier=2), [(8, 4)], 6 * 3 * 8, 3 * 8 + 8),
    (layers.DepthwiseConv2D(3), [(8, 8, 4)], 36 * 9 * 4, 9 * 4 + 4),
    (layers.SeparableConv1D(5, 3), [(8, 4)], 6 * (3 * 4 + 4 * 5), 3 * 4 + 4 * 5 + 5),
    (layers.SeparableConv2D(5, 3), [(8, 8, 4)], 36 * (9 * 4 + 4 * 5), 9 * 4 + 4 * 5 + 5),
    (layers.Embedding(100, 8), [(6,)], 0, 100 * 8),
    (layers.BatchNormalization(), [(8, 4)], 0, 4 * 4),
    (layers.LayerNormalization(), [(8, 4)], 0, 2 * 4),
    (layers.GroupNormalization(2), [(8, 4)], 0, 2 * 4),
    (layers.RMSNormalization(), [(8, 4)], 0, 4),
    (layers.PReLU(shared_axes=[1]), [(8, 4)], 0, 4),
    (layers.LSTM(5), [(7, 4)], 7 * 4 * (4 * 5 + 5 * 5), 4 * (4 * 5 + 5 * 5 + 5)),
    (layers.GRU(5), [(7, 4)], 7 * 3 * (4 * 5 + 5 * 5), 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (layers.SimpleRNN(5), [(7, 4)], 7 * (4 * 5 + 5 * 5), 4 * 5 + 5 * 5 + 5),
    (layers.RNN(layers.LSTMCell(5)), [(7, 4)], 7 * 4 * (4 * 5 + 5 * 5), 4 * (4 * 5 + 5 * 5 + 5)),
    (layers.RNN(layers.GRUCell(5)), [(7, 4)], 7 * 3 * (4 * 5 + 5 * 5), 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (
        layers.RNN(layers.StackedRNNCells([layers.SimpleRNNCell(5), layers.SimpleRNNCell(6)])),
        [(7, 4)],
        7 * (4 * 5 + 5 * 5 + 5 * 6 + 6 * 6),
        4 * 5 + 5 * 5 + 5 + 5 * 6 + 6 * 6 + 6,
    ),
    (layers.Bidirectional(layers.GRU(5)), [(7, 4)], 2 * 7 * 3 * (4 * 5 + 5 * 5), 2 * 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (layers.TimeDistributed(layers.Dense(5)), [(7, 4)], 7 * 4 * 5, 4 * 5 + 5),
    (layers.ConvLSTM1D(2, 3), [(4, 8, 3)], 4 * 4 * 6 * 3 * (3 + 2) * 2, 4 * (3 * (3 + 2) * 2 + 2)),
    (layers.ConvLSTM2D(2, 3), [(4, 8, 8, 3)], 4 * 4 * 36 * 9 * (3 + 2) * 2, 4 * (9 * (3 + 2) * 2 + 2)),
    (layers.ConvLSTM3D(2, 3), [(2, 4, 4, 4, 3)], 2 * 4 * 8 * 27 * (3 + 2) * 2, 4 * (27 * (3 + 2) * 2 + 2)),
    (layers.Attention(use_scale=True), [(7, 4), (9, 4)], 2 * 7 * 9 * 4, 1),
    (layers.AdditiveAttention(), [(7, 4), (9, 4)], 7 * 9 * 4, 4),
    (
        Attend(layers.MultiHeadAttention(2, 3)),
        [(7, 4), (9, 4)],
        7 * 4 * 6 + 2 * 9 * 4 * 6 + 2 * 7 * 9 * 6 + 7 * 6 * 4,
        3 * (4 * 6 + 6) + 6 * 4 + 4,
    ),
    (
        Attend(layers.GroupQueryAttention(3, 4, 2)),
        [(7, 4), (9, 4)],
        7 * 4 * 12 + 2 * 9 * 4 * 6 + 2 * 7 * 9 * 12 + 7 * 12 * 4,
        (4 * 12 + 12) + 2 * (4 * 6 + 6) + 12 * 4 + 4,
    ),
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("layer", "shapes", "multiply_adds", "parameters"), BY_HAND, ids=[type(layer).__name__ for layer, *_ in BY_HAND]
)
def test_counts_agree_with_formulas_by_hand(layer, shapes, multiply_adds, parameters):
    found = alone(layer, *shapes, dtype="int32" if isinstance(layer, layers.Embedding) else "float32")
    assert found.unknown == ()
    assert (found.forward_flops, found.backward_flops) == (
        2 * BATCH * multiply_adds,
        4 * BATCH * multiply_adds,  # the gradients of the inputs and of the weights
    )
    assert found.parameters == parameters
