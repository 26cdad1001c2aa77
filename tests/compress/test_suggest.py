import json
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from taking import taking
from versions import since_keras

from tfopt.compress import suggest, suggesting
from tfopt.model.step_calls import StepCalls

layers = keras.layers


def forms(model, batch, **options):
    return {(form.path, form.form): form for form in suggest(model, batch, **options).forms}


def stacked(compiled, *stack):
    return compiled(keras.Sequential(stack))


@pytest.mark.usefixtures("quick")
def test_each_form_gives_the_shapes_of_its_layer(compiled, batch, monkeypatch):
    stack = [keras.Input((9, 9, 8)), layers.Conv2D(12, 3, strides=2, padding="same"), layers.ReLU()]
    seen = []
    distance = suggesting._measured

    def checked(model, call, *arguments):
        form = arguments[-1]
        found = distance(model, call, *arguments)
        seen.append((call.again(call.tensors).shape, form.layer(call.tensors[0]).shape))
        return found

    monkeypatch.setattr(suggesting, "_measured", checked)
    found = forms(stacked(compiled, *stack), batch((9, 9, 8)))
    assert {form for _, form in found} == {
        "a separable convolution",
        "4 groups",
        "a bottleneck of 2 channels",
        "two of rank 5",
        "8 output channels",
    }
    shapes = [one == other for one, other in seen]
    assert shapes.count(False) == 1  # 8 output channels
    assert {name: form.parameters for (_, name), form in found.items()} == {
        "a separable convolution": (9 * 8 * 12 + 12, 9 * 8 + 8 * 12 + 12),
        "4 groups": (9 * 8 * 12 + 12, 9 * 2 * 12 + 12),
        "a bottleneck of 2 channels": (9 * 8 * 12 + 12, 8 * 2 + 9 * 2 * 2 + 2 * 12 + 12),
        "two of rank 5": (9 * 8 * 12 + 12, 72 * 5 + 5 * 12 + 12),
        "8 output channels": (9 * 8 * 12 + 12, 9 * 8 * 8 + 8),
    }


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["dense", "convolution"])
def test_a_low_rank_form_starts_from_the_best_approximation(compiled, kind):
    random = np.random.default_rng(0)
    if kind == "dense":
        layer, shape = layers.Dense(24, activation="relu"), (16,)
    else:
        layer, shape = layers.Conv2D(24, 1, activation="relu"), (3, 3, 16)
    model = stacked(compiled, keras.Input(shape), layer)
    layer.bias.assign(random.normal(size=24))
    inputs = random.normal(size=(5, *shape)).astype("float32")
    (form,) = (form for (_, name), form in forms(model, (inputs, np.zeros(5))).items() if "rank" in name)
    assert form.form == "two of rank 4"  # 16 · 24 / 2 parameters
    kernel = layer.kernel.numpy().reshape(16, 24)
    left, values, right = np.linalg.svd(kernel.astype("float64"))
    near = (left[:, :4] * values[:4]) @ right[:4]
    now, then = (np.maximum(inputs @ matrix + layer.bias.numpy(), 0) for matrix in (kernel, near))
    assert form.error == pytest.approx(np.linalg.norm(then - now) / np.linalg.norm(now), rel=1e-4)
    assert "the layer's own weights" in form.retrain


@pytest.mark.usefixtures("quick")
def test_attention_shares_its_key_heads(compiled, batch):
    inputs = keras.Input((6, 16))
    model = compiled(keras.Model(inputs, layers.MultiHeadAttention(8, 4, name="attention")(inputs, inputs)))
    found = forms(model, batch((6, 16)))
    (form,) = found.values()
    assert form.form == "2 key heads for 8 query heads"
    assert form.parameters == (4 * (16 * 32) + 3 * 32 + 16, 2 * 16 * 32 + 2 * 16 * 8 + 32 + 2 * 8 + 16)


@since_keras("3.15")
@pytest.mark.usefixtures("quick")
def test_attention_in_a_window_has_no_other_form(compiled, batch):
    inputs = keras.Input((6, 16))
    attention = layers.MultiHeadAttention(8, 4, sliding_window=2, name="attention")
    assert forms(compiled(keras.Model(inputs, attention(inputs, inputs))), batch((6, 16))) == {}


@pytest.mark.usefixtures("quick")
def test_the_costliest_layers_come_first_and_those_alike_once(compiled, batch, monkeypatch):
    stack = [
        layers.Dense(16, name="a"),
        layers.Dense(16, name="b"),
        layers.Dense(16, name="c"),
        layers.ReLU(name="act"),
    ]
    model = stacked(compiled, keras.Input((16,)), *stack, layers.Dense(8, name="last"))
    found = suggest(model, batch((16,)), layers=1)
    assert [(form.path, form.alike) for form in found.forms] == [("b", 1)]  # the first has no gradient of its input
    found = suggest(model, batch((16,)), layers=9)
    assert [form.path for form in found.forms] == ["b", "a", "last"]
    assert found.without == ("act",)
    assert "No cheaper form is known of: act." in str(found)


@pytest.mark.usefixtures("quick")
def test_what_is_slower_is_said_to_be_slower(compiled, batch, monkeypatch):
    model = stacked(compiled, keras.Input((8, 8, 8)), layers.Conv2D(8, 3, name="conv"))

    def timed(steps, turns):
        names = dict.fromkeys(steps, 2.0) | ({"form": 20.0} if "form" in steps else {})
        return {name: taking(ms, turns=turns) for name, ms in names.items()}

    monkeypatch.setattr(suggesting, "interleave", timed)
    found = suggest(model, batch((8, 8, 8)))
    assert not any(form.pays for form in found.forms)
    assert found.verdict == f"No cheaper form of the costliest layers of {model.name} is faster here."
    assert "0.10×, slower" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("quick")
def test_a_models_outputs_are_not_made_fewer(compiled, batch):
    stack = [layers.Dense(12, name="inner"), layers.Dense(10, name="classes")]
    found = forms(stacked(compiled, keras.Input((16,)), *stack), batch((16,)))
    assert ("inner", "8 outputs") in found
    assert ("classes", "8 outputs") not in found


@pytest.mark.usefixtures("quick")
def test_what_saves_most_is_named(compiled, batch, monkeypatch):
    model = stacked(compiled, keras.Input((16,)), layers.Dense(16, name="wide"))

    def timed(steps, turns):
        return {name: taking({"now": 3.0, "form": 1.0}.get(name, 2.0), turns=turns) for name in steps}

    monkeypatch.setattr(suggesting, "interleave", timed)
    found = suggest(model, batch((16,)))
    assert found.verdict == "wide as two of rank 4 saves 2 ms a step; train the model on, from the layer's own weights."


@pytest.mark.usefixtures("quick")
def test_a_form_without_a_kernel_is_listed_and_the_others_measured(compiled, batch, monkeypatch):
    def refused(self, inputs):
        raise tf.errors.UnimplementedError(None, None, "no such kernel")

    monkeypatch.setattr(layers.SeparableConv2D, "call", refused)
    found = suggest(stacked(compiled, keras.Input((8, 8, 8)), layers.Conv2D(8, 3, name="conv")), batch((8, 8, 8)))
    assert len(found.forms) == 3
    (listed,) = found.not_running
    assert listed.startswith("conv as a separable convolution (")
    assert "no such kernel" in listed
    assert "Does not run here: conv as a separable convolution (" in " ".join(str(found).split())


@pytest.mark.usefixtures("quick")
def test_python_draws_the_same_random_numbers_afterwards(compiled, batch):
    model = stacked(compiled, keras.Input((16,)), layers.Dense(16))
    before = random.getstate()
    suggest(model, batch((16,)))
    assert random.getstate() == before


@pytest.mark.usefixtures("quick")
def test_values_that_are_not_finite(compiled):
    layer = layers.Dense(16, name="wide")
    model = stacked(compiled, keras.Input((16,)), layer)
    data = np.full((3, 16), np.nan), np.zeros(3)
    (form,) = suggest(model, data).forms
    assert form.error is None
    layer.kernel.assign(np.full((16, 16), np.nan))
    assert suggest(model, data).not_running == ("wide as two of rank 4 (SVD did not converge)",)


@pytest.mark.slow
def test_nothing_of_the_model_changes_and_forms_are_measured(compiled, batch):
    model = stacked(compiled, keras.Input((16,)), layers.Dense(16), layers.BatchNormalization())
    before = [variable.numpy() for variable in model.variables]
    (form,) = suggest(model, batch((16,))).forms
    assert all(ms > 0 for ms in form.ms)
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert len(StepCalls(model, batch((16,))).calls) == 2


def test_a_wrong_number_of_layers_is_refused(compiled, batch):
    with pytest.raises(ValueError, match="layers"):
        suggest(stacked(compiled, keras.Input((4,)), layers.Dense(2)), batch((4,)), layers=0)
