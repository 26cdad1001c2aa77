"""The gate scales the loss as training will, and says so where training will not."""

import keras
import numpy as np
import pytest
from precision_nets import X, Y, functional

from tfopt import repairs
from tfopt.precision import apply, check

layers = keras.layers


def faint(hidden="float32", **options):
    """The gradient of "first" is about 10⁻⁸: zero in float16, unless the loss is scaled."""

    def body(x):
        x = layers.Dense(8, name="first", dtype=hidden)(x)
        return layers.Dense(3, name="head")(layers.Rescaling(1e-6, name="faint", dtype=hidden)(x))

    return functional(body, **{"optimizer": keras.optimizers.SGD(1e6), "jit_compile": False} | options)


def moves(model):
    """Whether a step of training changes the first layer."""
    kernel = model.get_layer("first").kernel
    before = kernel.numpy()
    model.fit(X, Y, verbose=0)
    return bool(np.any(kernel.numpy() != before))


@pytest.mark.slow
@pytest.mark.parametrize("scales", [True, False])
def test_a_loss_that_training_will_not_scale(scales):
    repairs.install("loss_scaling")  # which keeps the option
    model = faint(auto_scale_loss=scales)
    report = check(model, (X, Y), "mixed_float16")
    assert report.passed == scales, str(report)
    assert report.loss_scale == (2.0**15 if scales else 1)
    if not scales:
        assert report.problems[0].startswith("The gradient of 'first' underflows without loss scaling: 100 %")
        assert any("auto_scale_loss=False keeps it so" in note for note in report.notes)
    apply(model, "mixed_float16")
    assert moves(model) == scales


@pytest.mark.slow
def test_a_model_as_it_stands_is_not_scaled_by_apply():
    model = faint("mixed_float16")  # stock Keras does not scale the loss of layers with a policy of their own
    report = check(model, (X, Y), {})
    assert report.loss_scale == 1
    assert not report.passed
    assert any("apply adds one" in note for note in report.notes)
    assert not moves(model)
    assert check(model, (X, Y), "mixed_float16").passed
    apply(model, "mixed_float16")
    assert moves(model)


def test_a_constant_scale_of_the_optimizer_counts():
    repairs.install("loss_scaling")
    optimizer = keras.optimizers.SGD(1e6, loss_scale_factor=2.0**13)
    model = faint(optimizer=optimizer, auto_scale_loss=False)
    report = check(model, (X, Y), "mixed_float16")
    assert report.loss_scale == 2.0**13
    assert report.passed, str(report)
