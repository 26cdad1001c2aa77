import inspect

import keras
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.model.flops import fit_flops

layers, ops = keras.layers, keras.ops
BATCH = 3


def traced(model, *inputs, optimizer="sgd", examples=BATCH, **options):
    """Traces the training step for inputs without a fixed batch size, as `fit` does, and counts its FLOPs."""
    specs = [one if isinstance(one, tf.TypeSpec) else tf.TensorSpec((None, *one)) for one in inputs]
    spec = (specs[0] if len(specs) == 1 else tuple(specs), tf.TensorSpec((None,)))
    if not model.compiled:
        model.compile(optimizer, lambda _, output: ops.mean(output), **options)
    model.make_train_function()
    inspect.getclosurevars(model.train_function).nonlocals["one_step_on_data"].__wrapped__.get_concrete_function(spec)
    return fit_flops(model, spec, examples)


def counted(*stack, shape=(4,), **options):
    return traced(keras.Sequential(stack), shape, **options)


def resnet50_multiply_adds():
    """ResNet-50 forward at 224×224: He et al., 2015, table 1, with the stride in a stage's first 1×1 convolution."""
    total = 112**2 * 7 * 7 * 3 * 64
    channels, inputs, size = 64, 64, 56
    for blocks in (3, 4, 6, 3):
        for block in range(blocks):
            total += size**2 * (inputs * channels + 9 * channels**2 + channels * 4 * channels)
            if block == 0:
                total += size**2 * inputs * 4 * channels  # the shortcut's
            inputs = 4 * channels
        channels, size = 2 * channels, size // 2
    return total + 2048 * 1000


@pytest.mark.slow
def test_resnet50():
    found = traced(keras.applications.ResNet50(weights=None), (224, 224, 3))
    assert resnet50_multiply_adds() == 3_857_973_248
    # The first convolution has no gradient of its inputs.
    assert found.per_example == 2 * (3 * 3_857_973_248 - 112**2 * 7 * 7 * 3 * 64)
    assert found.unknown == ()


# What the layer computes forward, in multiply-adds: of the images or sequences themselves, and of what it made of them.
@pytest.mark.parametrize(
    ("stack", "shape", "first", "rest"),
    first_quick(
        [
            ([layers.Dense(5)], (4,), 4 * 5, 0),
            ([layers.LSTM(5)], (7, 4), 7 * 4 * 4 * 5, 7 * 4 * 5 * 5),
            (
                [layers.Conv2D(6, 3, padding="same", strides=2), layers.BatchNormalization()],
                (8, 8, 3),
                16 * 9 * 3 * 6,
                0,
            ),
            ([layers.Dense(5), layers.Conv1DTranspose(6, 3, strides=2)], (8, 3), 8 * 3 * 5, 8 * 3 * 5 * 6),
            ([layers.Dense(5, activation="relu"), layers.Dropout(0.5), layers.Dense(2)], (4,), 4 * 5, 5 * 2),
            ([layers.Dense(5)], (7, 4), 7 * 4 * 5, 0),
            ([layers.EinsumDense("abc,cd->abd", (None, 5))], (7, 4), 7 * 4 * 5, 0),
            ([layers.Dense(3), layers.Conv2D(6, 3, groups=3)], (8, 8, 3), 64 * 3 * 3, 36 * 9 * 6),
            ([layers.DepthwiseConv2D(3)], (8, 8, 3), 36 * 9 * 3, 0),
            ([layers.Dense(3), layers.DepthwiseConv2D(3, 2, depth_multiplier=2)], (8, 8, 3), 64 * 9, 9 * 9 * 6),
            ([layers.SeparableConv2D(5, 3)], (8, 8, 3), 36 * 9 * 3, 36 * 3 * 5),
            ([layers.Conv1D(6, 2)], (8, 3), 7 * 2 * 3 * 6, 0),
            ([layers.Conv1D(6, 3, dilation_rate=2, padding="causal")], (8, 3), 8 * 3 * 3 * 6, 0),
            ([layers.Dense(2), layers.Conv2D(6, 3, dilation_rate=2)], (8, 8, 3), 64 * 6, 16 * 9 * 2 * 6),
            ([layers.Conv3D(2, 3)], (4, 5, 6, 3), 2 * 3 * 4 * 27 * 3 * 2, 0),
            ([layers.Conv2DTranspose(6, 3, strides=2, padding="same")], (8, 8, 3), 64 * 9 * 3 * 6, 0),
            ([layers.Embedding(100, 8), layers.Flatten(), layers.Dense(2)], (6,), 0, 6 * 8 * 2),
            ([layers.GRU(5)], (7, 4), 7 * 3 * 4 * 5, 7 * 3 * 5 * 5),
            ([layers.Bidirectional(layers.SimpleRNN(5))], (7, 4), 2 * 7 * 4 * 5, 2 * 7 * 5 * 5),
            ([layers.LSTM(5, return_sequences=True), layers.Dense(2)], (7, 4), 7 * 4 * 4 * 5, 7 * (4 * 5 * 5 + 5 * 2)),
            ([layers.LSTM(5, unroll=True)], (7, 4), 7 * 4 * 4 * 5, 7 * 4 * 5 * 5),
            ([layers.ConvLSTM1D(2, 3)], (4, 8, 3), 4 * 4 * 6 * 3 * 3 * 2, 4 * 4 * 6 * 3 * 2 * 2),
            ([layers.TimeDistributed(layers.Dense(5))], (7, 4), 7 * 4 * 5, 0),
            ([keras.Sequential([layers.Dense(5)]), layers.LayerNormalization()], (4,), 4 * 5, 0),
        ],
        count=4,
    ),
)
def test_layers_by_hand(stack, shape, first, rest):
    # Backward, each product takes two more; the gradient of the model's own input is not needed.
    found = counted(*stack, shape=shape)
    assert (found.per_example, found.unknown) == (2 * (2 * first + 3 * rest), ())
