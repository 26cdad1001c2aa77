import keras
import pytest
from models import assert_same_state, state
from precision_nets import X, Y, functional, mlp, transformer

from tfopt.precision import check
from tfopt.precision.layers import layer_paths, present

layers = keras.layers


@pytest.mark.parametrize(
    ("make", "policy", "count"), [(transformer, "float8", 6), (mlp, "float8_from_mixed_float16", 3)]
)
def test_float8_is_compared_on_a_clone(make, policy, count):
    model, data = make()
    model.fit(*data, verbose=0)
    before = state(model)
    report = check(model, data, policy)
    assert_same_state(before, state(model))
    assert {present(layer).quantization_mode for layer in layer_paths(model)} == {None}
    assert report.passed, str(report)
    quantized = [layer for layer in report.layers if layer.policy.startswith("float8")]
    assert len(quantized) == count  # of the transformer four in attention and two in the block; not the head
    # Three bits of mantissa round by up to 6 %; without scales that fit, gradients would be zero.
    assert all(0.01 < layer.output.error < 0.2 and layer.weight_gradient.lost < 0.1 for layer in quantized)
    assert report.notes == ()


def test_float8_layers_have_taken_their_scales_from_steps_before():
    """Without, gradients of a millionth would be zero: 8 bits end at 10⁻⁵."""
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8, name="body")(x)), loss_weights=[1e-6])
    report = check(model, (X, Y), "float8")
    assert report.passed, str(report)
    assert next(x for x in report.layers if x.path == "body").weight_gradient.lost < 0.1
