"""Float8's margins beside NumPy, and the gate where values saturate or vanish."""

import json
import re

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from precision_nets import X, Y, functional
from quick import first_quick

from tfopt.precision import apply, check

layers = keras.layers


def stack(depth=1, **options):
    def body(x):
        for at in range(depth):
            x = layers.Dense(8, name=f"body{at}")(x)
        return layers.Dense(3, name="head")(x)

    return functional(body, **options)


def with_outlier(size):
    """One of the eight features is large."""
    return np.concatenate([X[:, :7], np.full((len(X), 1), size, "float32")], axis=1)


def rounded(values, scale, dtype=ml_dtypes.float8_e4m3fn):
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(values / scale, -limit, limit).astype(dtype).astype("float32") * scale


@pytest.mark.slow
@pytest.mark.parametrize("size", first_quick([1e5, 1.0]))
def test_margins_are_those_that_numpy_finds(size):
    model, inputs = stack(), with_outlier(size)
    original = keras.quantizers.quantize_and_dequantize
    report = check(model, (inputs, Y), "float8")
    assert keras.quantizers.quantize_and_dequantize is original
    found = {one.tensor: one for one in report.float8}
    assert list(found) == ["inputs", "kernel", "output gradient"]
    assert {one.path for one in report.float8} == {"body0"}
    for tensor, values in (("inputs", inputs), ("kernel", model.get_layer("body0").kernel.numpy())):
        one, amax = found[tensor], np.abs(values).max()
        assert one.format == "E4M3"
        assert one.largest == pytest.approx(amax)
        assert one.amax_history == pytest.approx([amax] * len(one.amax_history))
        assert one.scale == pytest.approx(amax / 448)
        assert one.margin == pytest.approx(1.0)
        zero = rounded(values, one.scale) == 0
        assert one.vanished == pytest.approx(zero.mean())
        assert one.lost == pytest.approx(np.linalg.norm(values[zero]) / np.linalg.norm(values))
        assert (one.saturated, one.clipped) == (0, 0)
    assert found["output gradient"].format == "E5M2"
    assert found["output gradient"].limit == pytest.approx(57344 * found["output gradient"].scale)
    assert json.loads(json.dumps(report.to_dict()))["float8"][0]["margin"] == pytest.approx(1.0)
    assert re.search(r"\n  body0, inputs, E4M3\n +[\d.]+ ", str(report))


@pytest.mark.slow
def test_an_outlier_that_leaves_no_room_for_other_values_does_not_pass():
    report = check(stack(), (with_outlier(1e6), Y), "float8")
    assert len(report.problems) == 1
    assert report.problems[0].startswith("Values vanish: 8")  # seven of eight features
    assert "of the nonzero values of the inputs of 'body0' in float8 (E4M3)" in report.problems[0]
    assert [layer.path for layer in report.layers if layer.blamed] == ["body0"]


def batches(*factors):
    x = np.concatenate([X * factor for factor in factors]).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, np.tile(Y, len(factors)))).batch(len(X))


@pytest.mark.slow
def test_a_batch_far_beyond_those_before_it_does_not_pass():
    report = check(stack(), batches(1, 1, 100), "float8")
    assert report.problems[0].startswith("Values saturate: 9")
    assert "of the norm of the inputs of 'body0' in float8 (E4M3) is cut off." in report.problems[0]
    (inputs,) = [one for one in report.float8 if one.tensor == "inputs"]
    amax = np.abs(X).max()
    beyond = np.maximum(np.abs(X * 100) - amax, 0)
    assert inputs.clipped == pytest.approx(np.linalg.norm(beyond) / np.linalg.norm(X * 100), rel=1e-3)
    assert inputs.saturated == pytest.approx(np.mean(np.abs(X * 100) > amax * (1 + 16 / 448)), rel=1e-3)
    assert check(stack(), batches(100, 1, 100), "float8").passed


@pytest.mark.slow
def test_a_scale_that_float16_rounds_to_zero_does_not_pass():
    """Keras divides by it in the dtype of the layer."""
    model = stack(loss_weights=[1e-6])
    report = check(model, (X, Y), "float8_from_mixed_float16")
    assert "of the norm of the output gradient of 'body0' in float8 (E5M2) becomes zero" in report.problems[0]
    assert "use float8_from_mixed_bfloat16" in report.problems[0]
    assert check(model, (X, Y), "float8_from_mixed_bfloat16").passed


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 5])
def test_scales_are_waited_for_through_all_layers(depth):
    """A gradient of a millionth vanishes in one layer after the other until each has its scale."""
    report = check(stack(depth, loss_weights=[1e-6]), (X, Y), "float8")
    assert report.passed, str(report)
    assert all(one.margin == pytest.approx(1, rel=0.2) for one in report.float8)


def test_apply_reports_what_training_has_recorded():
    model = stack()
    applied = apply(model, "float8")
    assert [(one.tensor, one.amax_history, one.margin) for one in applied.float8] == [
        ("inputs", (), None),
        ("kernel", (), None),
        ("output gradient", (), None),
    ]
    assert "margin" not in str(applied)
    model.fit(batches(1, 2, 3, 4), verbose=0, shuffle=False)
    applied = apply(model, "float8")
    inputs, amax = applied.float8[0], np.abs(X).max()
    assert inputs.amax_history == pytest.approx([4 * amax, 3 * amax, 2 * amax, amax])
    assert inputs.scale == pytest.approx(3 * amax / 448)  # the next step's, from the steps before the last
    assert inputs.margin == pytest.approx(3 / 4)
    assert "float8's smallest margin is 0.75×, in the inputs of 'body0'" in str(applied)
    assert json.loads(json.dumps(applied.to_dict()))["float8"][0]["path"] == "body0"
