import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from taking import taking

from tfopt.compress import Footprint, quantize, quantizing
from tfopt.errors import TfoptError, UnsupportedError
from tfopt.model.layers import layer_paths

layers = keras.layers
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(16, 12)).astype("float32")
Y = RANDOM.integers(4, size=16)


def footprint(mib, ms):
    """What a model takes."""
    forward = taking(ms, turns=3)
    return Footprint(parameters=1, mib=mib, gflops=None, step=None, forward=forward, quality={"loss": 1.0})


@pytest.fixture
def twice_as_fast(monkeypatch):
    """Takes 2 ms for inference before, and 1 ms after."""
    monkeypatch.setattr(quantizing, "footprints", lambda *_, **__: (footprint(2.0, 2.0), footprint(0.5, 1.0)))


def compiled(model, **options):
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def net():
    keras.utils.set_random_seed(0)
    stack = [keras.Input((12,)), layers.Dense(32, "relu", name="first"), layers.BatchNormalization(name="norm")]
    return compiled(keras.Sequential([*stack, layers.Dense(4, name="last")], name="net"))


def rounded(values, axis):
    """Values rounded to 8 bits by the largest one along an axis, as Keras documents it."""
    scale = 127 / np.maximum(np.abs(values).max(axis, keepdims=True), 1e-7)
    return np.clip(np.round(values * scale), -127, 127) / scale


@pytest.mark.usefixtures("twice_as_fast")
def test_layers_compute_with_integers_as_numpy_says():
    model = net()
    found = quantize(model, (X, Y))
    assert found.model.get_layer("first").kernel.dtype == "int8"
    (first, bias), (last, shift) = ((w.numpy() for w in model.get_layer(n).weights) for n in ("first", "last"))
    hidden = np.maximum(rounded(X, -1) @ rounded(first, 0) + bias, 0)
    outputs = rounded(hidden / np.sqrt(1.001), -1) @ rounded(last, 0) + shift
    np.testing.assert_allclose(found.model.predict(X, verbose=0), outputs, atol=2e-3)
    expected = model.predict(X, verbose=0)
    assert found.apart == pytest.approx(np.linalg.norm(outputs - expected) / np.linalg.norm(expected), rel=0.05)
    true = np.maximum(X @ first + bias, 0)
    assert found.layers["first"] == pytest.approx(np.linalg.norm(hidden - true) / np.linalg.norm(true), rel=0.05)
    assert list(found.layers) == ["first", "last"]
    assert found.left == {}
    assert "The weights of 2 layers have 8 bits. Inference is 2 times as fast" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("twice_as_fast")
def test_the_model_stays_and_the_new_one_can_be_saved(tmp_path):
    model = net()
    before = [weight.numpy() for weight in model.weights]
    found = quantize(model, tf.data.Dataset.from_tensor_slices((X, Y)).batch(8))
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(weight.numpy(), value)
    found.model.save(tmp_path / "small.keras")
    loaded = keras.models.load_model(tmp_path / "small.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), found.model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("twice_as_fast")
def test_the_worst_layers_compute_as_before():
    model = net()
    found = quantize(model, (with_small_weights_of_no_effect(model), Y))
    assert list(found.layers) == ["last"]
    assert found.left.keys() == {"first"}
    assert found.left["first"].startswith("off by ")
    assert found.apart < 0.05
    assert found.model.get_layer("first").kernel.dtype == "float32"


def with_small_weights_of_no_effect(model):
    """Gives the first layer weights of which all that matter are rounded to zero, and returns inputs."""
    kernel = np.zeros((12, 32), "float32")
    kernel[0], kernel[1:] = 1e4, RANDOM.normal(size=(11, 32))
    model.get_layer("first").kernel.assign(kernel)
    return np.concatenate([np.zeros((16, 1), "float32"), X[:, 1:]], 1)


@pytest.mark.usefixtures("twice_as_fast")
def test_no_output_is_off_by_more_than_allowed_even_if_another_is_much_larger():
    inputs = keras.Input((12,))
    large = layers.Dense(4, kernel_initializer=keras.initializers.RandomNormal(0, 1e6, 0), name="large")(inputs)
    model = keras.Model(inputs, {"large": large, "small": layers.Dense(32, name="first")(inputs)})
    model.compile("sgd", "mse")
    x = with_small_weights_of_no_effect(model)
    found = quantize(model, (x, {"large": x[:, :4], "small": np.zeros((16, 32))}))
    assert list(found.layers) == ["large"]


@pytest.mark.usefixtures("twice_as_fast")
def test_outputs_that_are_not_finite_are_left_out():
    x = X.copy()
    x[3] = np.nan
    assert quantize(net(), (x, Y)).apart < 0.05
    with pytest.raises(TfoptError, match="computes only NaN or infinity"):
        quantize(net(), (X * np.nan, Y))


@pytest.mark.usefixtures("untimed")
def test_as_many_parameters_as_before():
    found = quantize(net(), (X, Y), bits=4)
    assert found.before.parameters == found.after.parameters == net().count_params()


@pytest.mark.usefixtures("twice_as_fast")
def test_attention_embeddings_and_what_keras_cannot_quantize():
    class Own(layers.Dense):
        pass

    ids = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16, name="embedding")(ids)
    x = layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    x = layers.Conv1D(8, 3, name="conv")(x)
    x = Own(8, name="own")(layers.LSTM(8, name="lstm")(x))
    model = compiled(keras.Model(ids, layers.Dense(4, name="head")(x)))
    found = quantize(model, (RANDOM.integers(20, size=(16, 6)), Y))
    inner = {f"attention/{name}" for name in ("query", "key", "value", "attention_output")}
    assert found.layers.keys() | found.left.keys() >= {"embedding", "head", *inner}
    assert "no 8-bit Conv1D" in found.left["conv"]
    assert found.left["own"] == "its own class"
    assert all("LSTMCell" in why for path, why in found.left.items() if path.startswith("lstm"))
    assert set(layer_paths(model).values()) >= found.left.keys()


@pytest.mark.usefixtures("twice_as_fast")
def test_a_layer_that_another_calls_past_its_integers_computes_as_before():
    stack = [keras.Input((3, 4)), layers.TimeDistributed(layers.Dense(32, name="inner"), name="outer")]
    model = compiled(keras.Sequential([*stack, layers.Flatten(), layers.Dense(4, name="last")]))
    found = quantize(model, (X.reshape(16, 3, 4), Y))
    assert list(found.layers) == ["last"]
    assert found.left == {"outer/inner": "the layer around it calls it past its integers"}


def test_what_is_not_faster_is_refused(monkeypatch):
    monkeypatch.setattr(quantizing, "footprints", lambda *_, **__: (footprint(2.0, 1.0), footprint(0.5, 2.0)))
    says = r"0\.5 times as fast .*slower, and only the weights are smaller, 2 MiB → 0\.5"
    with pytest.raises(UnsupportedError, match=says):
        quantize(net(), (X, Y))


@pytest.mark.usefixtures("twice_as_fast")
def test_models_that_cannot_be_quantized_are_refused():
    with pytest.raises(ValueError, match=r"8 or 4 bits.* Received: 16"):
        quantize(net(), (X, Y), bits=16)
    with pytest.raises(ValueError, match=r"8 or 4 bits.* Received: \[8\]"):
        quantize(net(), (X, Y), bits=[8])
    keras.config.set_dtype_policy("mixed_float16")
    model = net()
    keras.config.set_dtype_policy("float32")
    with pytest.raises(UnsupportedError, match=r"first: .*float16"):
        quantize(model, (X, Y))
    stack = [keras.Input((12,)), layers.Reshape((12, 1)), layers.Conv1D(2, 3), layers.Flatten()]
    model = compiled(keras.Sequential(stack))
    with pytest.raises(
        UnsupportedError, match=r"Expected layers .* in 8 bits. Found none in .*; conv.*: Keras has no 8-bit C"
    ):
        quantize(model, (X, Y))
    with pytest.raises(ValueError, match="not compiled"):
        quantize(keras.Sequential([keras.Input((12,)), layers.Dense(2)]), (X, Y))


@pytest.mark.slow
def test_both_models_are_measured():
    keras.utils.set_random_seed(0)
    stack = [layers.Dense(1024, "relu") for _ in range(3)]
    model = keras.Sequential([keras.Input((512,)), *stack, layers.Dense(4)])
    model.compile("sgd", "mse", jit_compile=True)
    x = RANDOM.normal(size=(32, 512)).astype("float32")
    try:
        found = quantize(model, (x, np.zeros((32, 4))))
    except UnsupportedError as error:  # on a machine whose XLA is slow with integers
        assert "only the weights are smaller" in str(error)  # noqa: PT017
    else:
        assert found.after.mib < found.before.mib / 3
        assert found.before.step is None
        assert found.speedup.ratio > 1


@pytest.mark.parametrize(
    ("expected", "found", "distance"),
    [
        ([np.array([3.0, 4.0])], [np.array([3.0, 4.5])], 0.1),
        ([[3.0], [1.0]], [[3.3], [1.0]], 0.1),  # of the output furthest off
        ([[3.0], [1.0]], [[3.0], [np.nan]], np.inf),
        ([[1.0], [0.0]], [[1.0], [1e-6]], 1e-6),  # next to an output of zeros
    ],
)
def test_the_distance_of_outputs(expected, found, distance):
    assert quantizing._distance([expected], [found]) == pytest.approx(distance)
