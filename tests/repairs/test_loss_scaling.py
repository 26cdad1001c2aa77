import gc

import keras
import numpy as np
import pytest
from keras.optimizers import LossScaleOptimizer

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.model.layers import computing_layers

X = np.random.default_rng(0).random((16, 4), "float32")
Y = X.sum(1, keepdims=True)


def net(hidden="mixed_float16", **compile_options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, dtype=hidden), keras.layers.Dense(1, dtype="float32")]
    )
    model.compile(**{"optimizer": "adam", "loss": "mse", "run_eagerly": True} | compile_options)
    return model


def scaled(model):
    return isinstance(model.optimizer, LossScaleOptimizer)


def optimizer_state(model):
    return [variable.numpy().tolist() for variable in model.optimizer.variables]


def by_map():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="float32")
    policies["small/hidden"] = keras.DTypePolicy("mixed_float16")
    layers = [keras.layers.Dense(8, dtype=policies, name="hidden"), keras.layers.Dense(1, dtype=policies)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="small")
    model.compile("adam", "mse")
    return model


def by_policy_set_later():
    model = net("float32", loss=None)
    model.layers[0].dtype_policy = "mixed_float16"
    model.compile("adam", "mse")
    return model


def by_nesting():
    inner = net()
    outer = keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])
    outer.compile("adam", "mse")
    return outer


class Attended(keras.Model):
    """Its layers are there from the start, theirs when they are built."""

    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(1, 2, dtype="mixed_float16")
        self.head = keras.layers.Dense(1)

    def call(self, inputs):
        tokens = inputs[:, :, None]
        return self.head(self.attention(tokens, tokens)[:, 0])


def by_subclass():
    model = Attended()
    model.compile("adam", "mse")
    return model


def by_cloning():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    keras.config.set_dtype_policy("float32")
    clone = keras.models.clone_model(model)
    clone.compile("adam", "mse")
    return clone


MAKERS = [
    net,
    by_map,
    by_policy_set_later,
    by_nesting,
    by_subclass,
    by_cloning,
    lambda: net("float16"),
    lambda: net("float8_from_mixed_float16"),
]


@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_float16_in_any_layer_is_scaled(make):
    assert not scaled(make())  # stock
    repairs.install("loss_scaling")
    model = make()
    assert scaled(model)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam)


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "float64", "float8_from_float32"])
def test_other_policies_are_left_alone(policy):
    repairs.install("loss_scaling")
    assert not scaled(net(policy))


def test_a_model_policy_that_no_layer_has_scales_nothing(under):
    under("mixed_float16")
    assert scaled(net("float32"))  # stock goes by the model alone
    repairs.install("loss_scaling")
    assert not scaled(net("float32"))


def test_a_model_that_has_no_layers_yet_goes_by_its_own_policy(under):
    repairs.install("loss_scaling")
    under("mixed_float16")
    model = keras.Sequential()
    model.compile("sgd", "mse")
    assert scaled(model)


def test_the_users_choice_stands():
    repairs.install("loss_scaling")
    assert not scaled(net(auto_scale_loss=False))
    own = LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=8.0)
    assert net(optimizer=own).optimizer is own
    model = net()
    adam = keras.optimizers.Adam()
    model.compile(adam, "mse")
    assert model.optimizer.inner_optimizer is adam
    no_optimizer = keras.Sequential([keras.layers.Dense(1, dtype="mixed_float16")])
    no_optimizer.compile(optimizer=None, loss="mse")
    assert no_optimizer.optimizer is None


def test_arguments_by_position_and_wrong_ones():
    repairs.install("loss_scaling")
    model = net()
    model.compile("sgd", "mse", None, ["mae"], None, True)
    assert scaled(model)
    assert model.run_eagerly
    with pytest.raises(ValueError, match="Could not interpret optimizer identifier"):
        model.compile(3)
    with pytest.raises(TypeError, match="optimiser"):
        model.compile(optimiser="sgd")


def saved(path, *, make=net, **options):
    model = make(**options)
    model.fit(X, Y, epochs=2, verbose=0)
    assert model.optimizer.iterations.numpy() > 0  # so that fresh state would differ
    model.save(path)
    return model


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
@pytest.mark.parametrize("loaded_under", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("built_under", ["float32", "mixed_float16"])
def test_a_saved_model_keeps_wrapper_and_state(under, tmp_path, built_under, loaded_under):
    repairs.install("loss_scaling")
    under(built_under)
    model = saved(tmp_path / "model.keras")
    expected = optimizer_state(model)
    under(loaded_under)
    for use in (repairs.install, repairs.remove):  # stock Keras reads the file as well
        use("loss_scaling")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert scaled(loaded)
        assert optimizer_state(loaded) == expected


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_a_file_of_stock_keras(under, tmp_path):
    under("mixed_float16")
    model = saved(tmp_path / "model.keras")
    assert scaled(model)
    under("float32")
    stock = keras.models.load_model(tmp_path / "model.keras")
    assert not scaled(stock)
    assert stock.optimizer.iterations.numpy() == 0
    repairs.install("loss_scaling")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert scaled(loaded)
    assert optimizer_state(loaded) == optimizer_state(model)


@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer")
def test_a_float32_model_loaded_under_float16_keeps_its_state(under, tmp_path):
    model = saved(tmp_path / "model.keras", hidden="float32")
    under("mixed_float16")
    stock = keras.models.load_model(tmp_path / "model.keras")
    assert scaled(stock)
    assert stock.optimizer.iterations.numpy() == 0
    repairs.install("loss_scaling")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert optimizer_state(loaded) == optimizer_state(model)


@pytest.mark.parametrize("copied", ["loaded", "cloned"])
def test_unscaled_by_choice_stays_so(under, tmp_path, copied):
    under("mixed_float16")
    repairs.install("loss_scaling")
    model = saved(tmp_path / "model.keras", auto_scale_loss=False)
    if copied == "cloned":
        assert not scaled(keras.models.clone_model(model))
    else:
        loaded = keras.models.load_model(tmp_path / "model.keras")
        assert optimizer_state(loaded) == optimizer_state(model)
        loaded.fit(X, Y, verbose=0)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


class OwnCall(keras.Sequential):
    def call(self, inputs, **options):
        return 2 * super().call(inputs, **options)


@pytest.mark.parametrize("kind", [keras.Sequential, OwnStep, OwnCall, Attended])
def test_what_only_holds_layers_computes_nothing(under, kind):
    under("mixed_float16")
    model = kind() if kind is Attended else kind([keras.Input((4,)), keras.layers.Dense(1)])
    under("float32")
    outer = keras.Sequential([keras.Input((4,)), model])
    found = {type(layer) for layer in computing_layers(outer)}
    assert {keras.layers.InputLayer, keras.Sequential}.isdisjoint(found)
    assert (kind in found) == (kind in (OwnCall, Attended))
    assert keras.layers.Dense in found


class Late(keras.layers.Layer):
    """A float32 layer that makes a float16 one when it is built."""

    def build(self, shape):
        self.inner = keras.layers.Dense(2, dtype="mixed_float16")
        self.inner.build(shape)

    def call(self, inputs):
        return self.inner(inputs)


class Lately(keras.Model):
    def __init__(self):
        super().__init__()
        self.late, self.head = Late(), keras.layers.Dense(1)

    def call(self, inputs):
        return self.head(self.late(inputs))


@pytest.mark.slow
@pytest.mark.parametrize("eagerly", [False, True])
def test_layers_made_after_compile_are_refused(eagerly):
    repairs.install("loss_scaling")
    model = Lately()
    model.compile("adam", "mse", run_eagerly=eagerly)
    with pytest.raises(UnsupportedError, match=r"created, or became float16, afterwards\. Build the model before"):
        model.fit(X, Y, verbose=0)
    model.compile("adam", "mse")  # built by now
    assert scaled(model)
    model.fit(X, Y, verbose=0)
    unscaled = Lately()
    unscaled.compile("adam", "mse", auto_scale_loss=False)
    unscaled.fit(X, Y, verbose=0)


def test_a_policy_given_after_compile_is_refused():
    repairs.install("loss_scaling")
    model = net("float32")
    model.fit(X, Y, verbose=0)
    model.layers[0].dtype_policy = "mixed_float16"
    with pytest.raises(UnsupportedError, match=model.name):
        model.fit(X, Y, verbose=0)


def test_models_are_not_kept_alive():
    from tfopt.repairs import mixed_precision

    repairs.install("loss_scaling")
    model = net("float32")
    assert model in mixed_precision._plain
    before = len(mixed_precision._plain)
    del model
    gc.collect()
    assert len(mixed_precision._plain) < before


def test_a_compile_of_ones_own_goes_through():
    class Own(keras.Sequential):
        def compile(self, rate):
            super().compile(keras.optimizers.SGD(rate), "mse")

    repairs.install("loss_scaling")
    model = Own([keras.Input((4,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile(0.5)
    assert scaled(model)
    assert float(model.optimizer.learning_rate.numpy()) == 0.5
