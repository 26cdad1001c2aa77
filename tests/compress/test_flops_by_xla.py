"""FLOPs of ten models beside XLA's cost analysis, as benchmarks/flops_by_xla.py recorded it with JAX."""

import json
import math
from pathlib import Path

import flops_by_xla
import keras
import pytest
import tensorflow as tf

from tfopt.compress.costing import cost_and_calls

RESULTS = Path(flops_by_xla.__file__).with_name("results") / "flops-by-xla.json"
RECORDED = json.loads(RESULTS.read_text(encoding="utf-8"))


def inside(layer, shape):
    """The share of a convolution's products that are not with padding, which XLA does not count."""
    if getattr(layer, "padding", "valid") != "same" or isinstance(layer, keras.layers.Conv2DTranspose):
        return 1.0
    outputs = layer.compute_output_shape(shape)
    return math.prod(
        _inside(*along) for along in zip(shape[1:3], outputs[1:3], layer.kernel_size, layer.strides, strict=True)
    )


def _inside(size, outputs, kernel, stride, before=None):
    if before is None:
        before = max((outputs - 1) * stride + kernel - size, 0) // 2
    taps = [place * stride - before + tap for place in range(outputs) for tap in range(kernel)]
    return sum(0 <= tap < size for tap in taps) / len(taps)


def inside_zeros(layer, padding, shape):
    """The same of a convolution behind a layer that pads, which XLA makes one operation of."""
    outputs = layer.compute_output_shape(shape)
    along = zip(shape[1:3], outputs[1:3], layer.kernel_size, layer.strides, padding.padding, strict=True)
    return math.prod(_inside(size - sum(by), made, kernel, stride, by[0]) for size, made, kernel, stride, by in along)


def counted_by_xla(layer, call, before):
    """A layer's FLOPs without what it multiplies with padding; `before` is the layer that computes before it."""
    if isinstance(call.layer, keras.layers.Conv2D) and isinstance(before, keras.layers.ZeroPadding2D):
        return layer.forward_flops * inside_zeros(call.layer, before, tuple(call.tensors[0].shape))
    if isinstance(call.layer, keras.layers.SeparableConv2D):  # of which only the first half has padding
        shape = call.tensors[0].shape
        pointwise = 2 * math.prod(call.layer.compute_output_shape(shape)[:3]) * shape[-1] * call.layer.filters
        return pointwise + (layer.forward_flops - pointwise) * inside(call.layer, shape)
    if not call.tensors or not layer.forward_flops:
        return layer.forward_flops
    return layer.forward_flops * inside(call.layer, tuple(call.tensors[0].shape))


SMALL = ("perceptron", "U-Net")
MODELS = [
    pytest.param(name, marks=pytest.mark.slow if name in SMALL else pytest.mark.campaign)
    for name in flops_by_xla.MODELS
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", MODELS)
def test_flops_agree_with_xlas_cost_analysis(name, compiled):
    model, shape = flops_by_xla.MODELS[name]()
    found, calls = cost_and_calls(compiled(model), (tf.zeros(shape), tf.zeros(shape[0])))
    before = [None, *(call.layer for call in calls)]
    counted = sum(counted_by_xla(*each) for each in zip(found.layers, calls, before, strict=False))
    assert counted == pytest.approx(RECORDED["flops"][name], rel=0.02)


def test_ten_models_were_recorded():
    assert set(RECORDED["flops"]) == set(flops_by_xla.MODELS)
    assert len(flops_by_xla.MODELS) == 10
    assert RECORDED["batch_size"] == flops_by_xla.BATCH


def test_the_share_inside_by_hand():
    # 3 taps at 4 places: the first and the last place have one tap in the padding.
    assert _inside(4, 4, 3, 1) == 10 / 12
    assert _inside(4, 2, 3, 2) == 5 / 6  # TensorFlow pads at the end
