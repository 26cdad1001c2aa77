import re

import keras
import numpy as np
import pytest
from models import batch, small_net
from quick import first_quick

from tfopt import repairs
from tfopt.model.layers import layer_paths
from tfopt.precision import apply
from tfopt.precision.layer_policies import current_policy

layers = keras.layers
Scaled = keras.optimizers.LossScaleOptimizer
X = np.random.default_rng(0).normal(size=(4, 3, 8)).astype("float32")


def policies(model):
    """By path, without the numbers that Keras gives to new layers."""
    paths = layer_paths(model)
    layers_inside = [x for x in paths if x is not model and not isinstance(x, layers.InputLayer)]
    return {re.sub(r"_\d+$", "", paths[layer]): current_policy(layer).name for layer in layers_inside}


def assert_equal(variables, others):
    for one, two in zip(variables, others, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("reader", first_quick(["tfopt", "stock"]))
def test_a_saved_model_keeps_policies_wrapper_and_state_under_another_policy(other, reader, tmp_path):
    model = small_net(jit_compile=False)
    apply(model, "mixed_float16")
    model.fit(*batch(), epochs=2, verbose=0)
    model.optimizer.dynamic_scale.assign(64.0)
    model.save(tmp_path / "net.keras")
    if reader == "stock":
        repairs.remove()
    keras.config.set_dtype_policy(other)
    loaded = keras.models.load_model(tmp_path / "net.keras")
    assert policies(loaded) == policies(model)
    assert isinstance(loaded.optimizer, Scaled)
    assert loaded.optimizer.dynamic_scale.numpy() == 64.0
    assert loaded.optimizer.iterations.numpy() == 2
    assert_equal(model.weights, loaded.weights)
    assert_equal(model.optimizer.variables, loaded.optimizer.variables)
    assert apply(loaded, "float32").loss_scaled is False  # it is known as nobody's wish


@pytest.mark.slow
def test_stock_loses_wrapper_and_state_of_a_model_made_under_the_policy(tmp_path):
    """D8, and that a model of stock Keras is mended by apply before it is saved."""
    keras.config.set_dtype_policy("mixed_float16")
    model = small_net("mixed_float16", jit_compile=False)
    model.fit(*batch(), verbose=0)
    stock, mended = tmp_path / "stock.keras", tmp_path / "mended.keras"
    model.save(stock)
    apply(model, "mixed_float16")
    model.save(mended)
    repairs.remove()
    keras.config.set_dtype_policy("float32")
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        lost = keras.models.load_model(stock)
    assert not isinstance(lost.optimizer, Scaled)
    assert lost.optimizer.iterations.numpy() == 0
    kept = keras.models.load_model(mended)
    assert isinstance(kept.optimizer, Scaled)
    assert kept.optimizer.iterations.numpy() == 1


@pytest.mark.slow
def test_a_weights_file_brings_back_wrapper_state(tmp_path):
    model = small_net(jit_compile=False)
    apply(model, "mixed_float16")
    model.fit(*batch(), verbose=0)
    model.optimizer.dynamic_scale.assign(64.0)
    model.save_weights(tmp_path / "net.weights.h5")
    other = small_net(jit_compile=False, seed=9)
    apply(other, "mixed_float16")
    other.optimizer.build(other.trainable_variables)
    other.load_weights(tmp_path / "net.weights.h5")
    assert other.optimizer.dynamic_scale.numpy() == 64.0
    assert_equal(model.weights, other.weights)
    assert_equal(model.optimizer.variables, other.optimizer.variables)


def composite():
    inputs = keras.Input((3, 8))
    x = layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    x = layers.Bidirectional(layers.LSTM(2, name="lstm", return_sequences=True), name="both")(x)
    x = layers.TimeDistributed(layers.Dense(2), name="each")(x)
    # cuDNN's takes no cell of another dtype than its layer's.
    x = layers.GRU(2, name="gru", return_sequences=True, use_cudnn=False)(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def test_policies_inside_of_keras_layers_are_kept(tmp_path):
    """Stock Keras makes a layer's inner ones anew under the policy of the outer one."""
    wanted = {
        ".*lstm_cell": "mixed_float16",
        "gru": "mixed_bfloat16",
        "gru/gru_cell": "float32",
        "query": "mixed_float16",
    }
    stock, model = composite(), composite()
    for layer in stock._flatten_layers():
        if layer.name in ("query", "lstm_cell"):
            layer.dtype_policy = "mixed_float16"
    applied = apply(model, wanted)
    assert applied.unsaved == ()
    for name, net in (("stock", stock), ("tfopt", model)):
        net.save(tmp_path / f"{name}.keras")
        loaded = keras.models.load_model(tmp_path / f"{name}.keras")
        assert (policies(loaded) == policies(net)) == (name == "tfopt"), policies(loaded)
    assert loaded(X).numpy().tobytes() == model(X).numpy().tobytes()
    apply(loaded, "float32")
    assert set(policies(loaded).values()) == {"float32"}


class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.head = layers.Dense(4, name="inner"), layers.Dense(2, name="head")

    def call(self, inputs):
        return self.head(self.inner(inputs))


def test_what_is_not_saved_is_said(tmp_path):
    model = Subclassed()
    model(X)
    applied = apply(model, "mixed_bfloat16")
    assert applied.unsaved == ("inner",)
    assert "apply again after loading a saved model, for inner" in str(applied)
    model.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras", custom_objects={"Subclassed": Subclassed})
    assert set(policies(loaded).values()) == {"float32"}

    inputs = keras.Input((3, 8))
    x = layers.SpatialDropout1D(0.1, name="spatial")(layers.MultiHeadAttention(2, 4, name="attention")(inputs, inputs))
    model = keras.Model(inputs, layers.Dense(2)(x))
    softmax = model.get_layer("attention")._softmax.name
    assert apply(model, {"attention": "mixed_bfloat16", softmax: "float32"}).unsaved == (f"attention/{softmax}",)
    assert apply(model, {"spatial": "mixed_bfloat16"}).unsaved == (f"attention/{softmax}", "spatial")
    model.save(tmp_path / "net.keras")
    lost = set(policies(model).items()) - set(policies(keras.models.load_model(tmp_path / "net.keras")).items())
    assert lost == {("attention/softmax", "float32"), ("spatial", "mixed_bfloat16")}


class Deep(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.inner = [layers.Dense(4, name=f"inner_{at}") for at in range(6)]
        self.head = layers.Dense(2, name="head")

    def call(self, inputs):
        for layer in self.inner:
            inputs = layer(inputs)
        return self.head(inputs)


def test_of_many_unsaved_layers_four_are_named():
    model = Deep()
    model(X)
    applied = apply(model, "mixed_bfloat16")
    assert len(applied.unsaved) == 6
    assert str(applied).endswith("a saved model, for inner_0, inner_1, inner_2, inner_3 and 2 more.")


EVERY = [
    layers.Dense(4),
    layers.EinsumDense("btc,cd->btd", (None, 4)),
    layers.Conv1D(4, 2),
    layers.SeparableConv1D(4, 2),
    layers.BatchNormalization(),
    layers.LayerNormalization(),
    layers.GroupNormalization(2),
    layers.RMSNormalization(),
    layers.Dropout(0.1),
    layers.Rescaling(2.0),
    layers.ReLU(),
    layers.LSTM(2),
    layers.RNN(layers.GRUCell(3)),
    layers.Bidirectional(layers.SimpleRNN(2)),
    layers.TimeDistributed(layers.Dense(2)),
    layers.SpectralNormalization(layers.Dense(2)),
    layers.GlobalAveragePooling1D(),
    layers.UnitNormalization(),
    layers.GaussianNoise(0.1),
    layers.Reshape((8, 3)),
    layers.Activation("gelu"),
]


@pytest.mark.parametrize("layer", EVERY, ids=lambda layer: type(layer).__name__)
def test_every_kind_of_layer_saves_its_policy_as_apply_says(layer):
    model = keras.Sequential(
        [keras.Input((3, 8)), type(layer).from_config(layer.get_config()), layers.Dense(2, name="head")]
    )
    applied = apply(model, "mixed_bfloat16")
    loaded = keras.Sequential.from_config(model.get_config())
    assert applied.unsaved == ()
    assert policies(loaded) == policies(model)
    assert "mixed_bfloat16" in policies(loaded).values()
