import keras
import numpy as np
import pytest
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.precision import apply
from tfopt.precision.float8_clones import quantized_clone
from tfopt.precision.layer_policies import assign_policies, current_policy

layers = keras.layers
X = np.random.default_rng(0).normal(size=(16, 3, 8)).astype("float32")
Y = np.random.default_rng(0).integers(3, size=16)


def net(optimizer="adam"):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3, 8))
    x = layers.Dense(8, activation="relu", name="dense")(inputs)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.GlobalAveragePooling1D(name="pool")(layers.EinsumDense("btc,cd->btd", (None, 8), name="einsum")(x))
    model = keras.Model(inputs, layers.Dense(3, name="head")(x), name="net")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    return model


def policies(model):
    paths = layer_paths(model)
    # The layers inside of attention that have no weights get new names each time.
    return {paths[layer]: current_policy(layer).name for layer in paths if layer.weights}


@pytest.mark.slow
def test_stock_quantizes_the_head_too_and_stops_a_fitted_model():
    model = net()
    model.fit(X, Y, verbose=0)
    with pytest.warns(UserWarning, match="does not have a `quantize` method"):
        model.quantize("float8")
    assert model.get_layer("head").quantization_mode == "float8"
    with pytest.raises(ValueError, match="Unknown variable"):
        model.fit(X, Y, verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["float8", "float8_from_mixed_float16"]))
def test_a_fitted_model_trains_on_with_its_state(policy):
    model = net()
    model.fit(X, Y, verbose=0)
    weights = {variable.path: variable.numpy() for variable in model.variables}
    slots = {variable.path: variable.numpy() for variable in model.optimizer.variables}
    applied = apply(model, policy)
    quantized = {path for path, name in applied.changed.items() if name.startswith("float8")}
    inside = {f"attention/{name}" for name in ("query", "key", "value", "attention_output")}
    assert quantized == {"dense", "einsum", *inside}
    assert policies(model)["head"] == "float32"
    assert applied.loss_scaled == ("float16" in policy)
    for before, now in ((weights, model.variables), (slots, model.optimizer.variables)):
        after = {variable.path: variable.numpy() for variable in now}
        assert all(after[path].tobytes() == value.tobytes() for path, value in before.items())
    history = model.fit(X, Y, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert model.optimizer.iterations.numpy() == 4
    assert model(X).dtype == "float32"
    assert model.get_layer("dense").inputs_amax_history.numpy().any()
    assert apply(model, "float8").changed == {}


def test_it_computes_in_8_bits():
    model = net()
    before = model(X).numpy()
    apply(model, "float8")
    error = np.abs(model(X).numpy() - before).max() / np.abs(before).max()
    assert 1e-3 < error < 0.2  # three bits of mantissa round by up to 6 %; float32's own rounding is below 1e-6


def test_single_layers_by_path():
    model = net()
    assert apply(
        model, {"attention": "float8", "dense": "mixed_bfloat16", "einsum": "float8_from_mixed_bfloat16"}
    ).changed == {
        "dense": "mixed_bfloat16",
        "einsum": "float8_from_mixed_bfloat16",
        **{f"attention/{x}": "float8_from_float32" for x in ("query", "key", "value", "attention_output")},
    }
    assert apply(model, {"head": "float8"}).changed == {"head": "float8_from_float32"}  # whoever names it gets it


@pytest.mark.slow
def test_a_saved_model_comes_back(tmp_path):
    """Stock Keras cannot load one with quantized attention: nothing says so of the layers inside."""
    model = net()
    model.fit(X, Y, verbose=0)
    apply(model, "float8")
    model.fit(X, Y, verbose=0)
    model.save(tmp_path / "net.keras")
    loaded = keras.models.load_model(tmp_path / "net.keras")
    assert policies(loaded) == policies(model)
    assert loaded(X).numpy().tobytes() == model(X).numpy().tobytes()
    for one, two in zip(model.optimizer.variables, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, two)

    stock = net()
    for layer in stock.get_layer("attention")._flatten_layers():
        if isinstance(layer, layers.EinsumDense):
            layer.quantize("float8")
    stock.save(tmp_path / "stock.keras")
    with pytest.raises(ValueError, match="could not be loaded"):
        keras.models.load_model(tmp_path / "stock.keras")


def test_a_layer_that_a_path_takes_out_of_an_expression_is_not_quantized():
    model = net()
    assert apply(model, {"den.*": "float8", "dense": "mixed_bfloat16"}).changed == {"dense": "mixed_bfloat16"}
    assert apply(model, {"den.*": "float8", "dense": "float32"}).changed == {"dense": "float32"}


@pytest.mark.parametrize("back", ["float32", "mixed_bfloat16", {"dense": "float32"}])
def test_it_cannot_be_taken_back(back):
    model = net()
    apply(model, "float8")
    with pytest.raises(UnsupportedError, match=r"Found: .*dense.*\. Quantization cannot be undone"):
        apply(model, back)
    assert set(policies(model).values()) == {"float32", "float8_from_float32"}


@pytest.mark.parametrize(
    ("make", "policy", "message"),
    [
        (net, "float8_from_float9", "Received: 'float9'"),
        (net, "float8_from_", "Received: ''"),
        (net, "float9", "Received: 'float9'"),
        (net, {"dens": "float8"}, "matches no layer. Did you mean 'dense'"),
        (net, {"pool": "float8"}, "Expected Dense or EinsumDense layers to quantize .* 'net', which has none"),
        (lambda: keras.Sequential([layers.Dense(2, name="a"), layers.Dense(2)]), "float8", "not built: a"),
    ],
)
def test_wrong_input(make, policy, message):
    with pytest.raises(ValueError, match=message):
        apply(make(), policy)


class Subclassed(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.units, self.dense, self.head = units, layers.Dense(units, name="dense"), layers.Dense(3, name="head")

    def call(self, inputs):
        return self.head(keras.ops.mean(self.dense(inputs), axis=1))

    def get_config(self):
        return {"units": self.units}


def subclassed():
    model = Subclassed(4)
    model(X)
    return model


def clone_of(model, policy="float8"):
    assigned = assign_policies(model, policy)
    return quantized_clone(model, assigned.policies, assigned.quantized)


@pytest.mark.parametrize("make", [net, subclassed])
def test_a_clone_is_quantized_and_the_model_is_not(make):
    model = make()
    apply(model, {"dense": "mixed_bfloat16"})
    before = policies(model)
    clone = clone_of(model)
    assert policies(model) == before
    assert [*layer_paths(clone).values()] == [*layer_paths(model).values()]
    assert policies(clone)["dense"] == "float8_from_mixed_bfloat16"
    assert clone.compiled == model.compiled
    for layer in ("dense", "head"):
        copied = clone.get_layer(layer).kernel.numpy()
        assert copied.tobytes() == model.get_layer(layer).kernel.numpy().tobytes()
    if model.compiled:
        assert np.isfinite(clone.evaluate(X, Y, verbose=0))


class NoConfig(Subclassed):
    def get_config(self):
        raise NotImplementedError("no config")


def test_a_model_that_cannot_be_copied():
    model = NoConfig(4)
    model(X)
    with pytest.raises(UnsupportedError, match="whose copy failed: no config"):
        clone_of(model)


class Fewer(Subclassed):
    """Its config forgets a layer that was added."""

    def get_config(self):
        return {"units": self.units}


class OwnLoss(keras.Sequential):
    """Keras copies it as a Sequential, whose loss is another one."""

    def compute_loss(self, *args, **kwargs):
        return 2.0 * super().compute_loss(*args, **kwargs)


def test_a_model_whose_copy_is_unlike():
    model = Fewer(4)
    model.extra = layers.ReLU(name="extra")
    model(X)
    with pytest.raises(
        UnsupportedError, match=r"what 'fewer\w*' does, .*Found nothing in place of ReLU\. Give its class"
    ):
        clone_of(model)
    model = OwnLoss([keras.Input((8,)), layers.Dense(4), layers.Dense(3)])
    with pytest.raises(UnsupportedError, match=r"Found Sequential in place of OwnLoss\. .* extend keras\.Model"):
        clone_of(model)


@pytest.mark.slow
def test_what_the_optimizer_was_told_beside_its_config_stays():
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[], var_names=["bias"])
    model = net(optimizer)
    model.fit(X, Y, verbose=0)
    apply(model, "float8_from_mixed_float16")
    inner, dense = model.optimizer.inner_optimizer, model.get_layer("dense")
    assert not inner._use_weight_decay(dense.bias)
    assert inner._use_weight_decay(dense._kernel)


@pytest.mark.slow
def test_layers_that_do_not_train_are_left_out_and_keep_their_slots():
    model = net()
    model.fit(X, Y, verbose=0)
    einsum = model.get_layer("einsum")
    einsum.trainable = False
    slots = {x.path: x.numpy() for x in model.optimizer.variables}
    assert "einsum" not in apply(model, "float8").changed
    after = {x.path: x.numpy() for x in model.optimizer.variables}
    assert all(after[path].tobytes() == value.tobytes() for path, value in slots.items())
    kernel = einsum.kernel.numpy()
    model.fit(X, Y, verbose=0)
    assert einsum.kernel.numpy().tobytes() == kernel.tobytes()
    einsum.trainable = True
    model.make_train_function(force=True)
    model.fit(X, Y, verbose=0)
    assert einsum.kernel.numpy().tobytes() != kernel.tobytes()


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1

    def get_config(self):
        return {}


class Nameless(keras.optimizers.SGD):
    def __init__(self):
        super().__init__(0.1)


@pytest.mark.parametrize(
    "make", [lambda: keras.optimizers.SGD(Warm()), lambda: keras.optimizers.SGD(lambda: 0.1), Nameless]
)
def test_an_optimizer_that_cannot_be_made_anew_is_refused_before_anything_changes(make):
    model = net(make())
    model.fit(X, Y, verbose=0)
    with pytest.raises(UnsupportedError, match=r"(?s)rebuilt from its config.*Found \w+, which failed.*Register"):
        apply(model, "float8_from_mixed_bfloat16")
    assert set(policies(model).values()) == {"float32"}
    model.fit(X, Y, verbose=0)
