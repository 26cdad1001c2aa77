"""What `prune` returns, what it leaves alone by name, and what it refuses."""

import json
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, state
from prunable_nets import NETS, inputs_of, randomized

from tfopt.compress import prune
from tfopt.compress.versions.rebuilding import rebuilt
from tfopt.errors import PipelineError, TfoptError, UnsupportedError

_L = keras.layers


def net(*layers, inputs=6, **options):
    model = randomized(keras.Sequential([keras.Input((inputs,)), *layers, _L.Dense(3, name="logits")], name="net"))
    model.compile(**{"optimizer": "adam", "loss": "mse"} | options)
    return model


def data_for(model, examples=8):
    x = inputs_of(model, examples)
    return x, np.random.default_rng(0).normal(size=(examples, 3)).astype("float32")


def test_the_report(unmeasured):
    pruned = prune(model := net(_L.Dense(40, "relu", name="hidden")), data_for(model))
    text = str(pruned)
    assert text.startswith("50 % of the channels and heads of 1 layer are cut. A training step is ")
    assert re.search(r"^  parameters +403 +203$", text, re.MULTILINE)
    assert "  hidden    20  40\n" in text
    assert "  logits  they are the model's output 'logits'" in text
    assert repr(pruned).startswith("<Pruned: 50 % of")
    assert json.loads(json.dumps(pruned.to_dict()))["kept"] == {"hidden": [20, 40]}


@pytest.mark.slow
def test_a_pruned_model_and_its_figures():
    model = net(_L.Dense(40, "relu", name="hidden"), _L.BatchNormalization(), metrics=["mae"])
    model.fit(*data_for(model), verbose=0)
    before, seed = state(model), random.getstate()
    data = tf.data.Dataset.from_tensor_slices(data_for(model, 20)).batch(8)
    pruned = prune(model, data)
    assert_same_state(state(model), before)
    assert random.getstate() == seed
    assert pruned.kept == {"hidden": (20, 40)}
    assert pruned.left == {"logits": "they are the model's output 'logits'"}
    assert pruned.reached == 0.5
    assert pruned.before.parameters == model.count_params() == 6 * 40 + 40 + 4 * 40 + 40 * 3 + 3
    assert pruned.after.parameters == pruned.model.count_params() == 6 * 20 + 20 + 4 * 20 + 20 * 3 + 3
    assert pruned.before.quality == pytest.approx(model.evaluate(data, verbose=0, return_dict=True))
    assert pruned.after.quality == pytest.approx(pruned.model.evaluate(data, verbose=0, return_dict=True))
    assert pruned.after.gflops == pytest.approx(pruned.before.gflops / 2)
    assert json.dumps(pruned.to_dict())


def test_the_smaller_model_is_compiled_alike_and_its_optimizer_is_fresh(unmeasured):
    metric = keras.metrics.MeanAbsoluteError(name="own")
    optimizer = keras.optimizers.Adam(0.01, beta_1=0.8, clipnorm=1.0)
    model = net(_L.Dense(8), optimizer=optimizer, metrics=[metric], jit_compile=True, steps_per_execution=2)
    model.optimizer.learning_rate = 0.005
    new = prune(model, data_for(model)).model
    assert new.optimizer is not optimizer
    assert new.optimizer.get_config() == pytest.approx(optimizer.get_config())
    assert not new.optimizer.built
    assert (new.loss, new.jit_compile, new.steps_per_execution) == ("mse", True, 2)
    held = new._compile_metrics._user_metrics
    assert [type(one) for one in held] == [type(metric)]
    assert held[0] is not metric


def test_names_and_settings_of_layers_stay(unmeasured):
    model = net(_L.Dense(8, name="hidden", kernel_regularizer="l2", trainable=False), _L.Dropout(0.3, name="drop"))
    new = prune(model, data_for(model)).model
    assert new.name == "net"
    assert [layer.name for layer in new.layers] == ["hidden", "drop", "logits"]
    configs = [[layer.get_config() for layer in one.layers] for one in (model, new)]
    assert configs[1][0] == configs[0][0] | {"units": 4}
    assert configs[1][1:] == configs[0][1:]
    assert [one.path for one in new.trainable_weights] == [one.path for one in model.trainable_weights]
    new.fit(*data_for(model), verbose=0)


def test_frozen_parts_stay_frozen():
    model = NETS["nested"]()
    model.get_layer("inner").trainable = False
    model.get_layer("inner").get_layer("back").trainable = True
    model.compile("sgd", "mse")
    new = rebuilt(model)
    assert [one.trainable for one in new._flatten_layers()] == [one.trainable for one in model._flatten_layers()]
    assert not new.get_layer("inner").trainable


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_16_bit_models(unmeasured, policy):
    keras.config.set_dtype_policy(policy)
    model = net(_L.Dense(8))
    keras.config.set_dtype_policy("float32")
    new = prune(model, data_for(model)).model
    assert new.dtype_policy.name == new.layers[0].dtype_policy.name == policy
    assert type(new.optimizer) is type(model.optimizer)
    new.fit(*data_for(model), verbose=0)


def test_small_gradients_of_float16_count(unmeasured):
    layers = [_L.Dense(8, name="hidden", dtype="mixed_float16"), _L.Dense(3, dtype="mixed_float16")]
    model = net(*layers)
    x, y = data_for(model)
    model.compile("sgd", lambda y, p: 1e-8 * keras.ops.mean((y - p) ** 2))
    useless = [1, 2, 4, 7]
    model.layers[1].kernel.assign(np.asarray(model.layers[1].kernel) * (1e-3 ** np.isin(range(8), useless))[:, None])
    new = prune(model, (x, y)).model
    np.testing.assert_array_equal(new.layers[0].kernel, np.delete(np.asarray(model.layers[0].kernel), useless, 1))


class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class WithOwnCall(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.logits = _L.Dense(8), _L.Dense(3)

    def call(self, x):
        return self.logits(self.hidden(x))


class WithOwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return super().compute_loss(x, y, y_pred, sample_weight)


class Wrapped(keras.Model):
    def __init__(self):
        x = keras.Input((6,))
        super().__init__(x, _L.Dense(3)(_L.Dense(8)(x)))


class WrappedWithStep(Wrapped):
    train_step = WithOwnStep.train_step


FACTOR = 3.0


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (_L.Lambda(lambda x: FACTOR * x, name="odd"), "'odd' (Lambda) computes from them what tfopt does not know"),
        (Doubled(name="odd"), "'odd' (Doubled) computes from them what tfopt does not know"),
        (_L.LayerNormalization(name="odd"), "'odd' (LayerNormalization) normalizes over them, so that each depends"),
        (_L.Softmax(name="odd"), "'odd' (Softmax) normalizes over them, so that each depends on all"),
        (_L.Activation("softmax", name="odd"), "'odd' (Activation) computes its activation from all of them together"),
        (_L.Activation(lambda x: x * 2, name="odd"), "'odd' (Activation) computes its activation from all of them"),
        (_L.Dropout(0.1, noise_shape=(None, 8), name="odd"), "'odd' (Dropout) has a noise_shape for as many as there"),
        (_L.Rescaling([1.0] * 8, name="odd"), "'odd' (Rescaling) has a scale for each of them in its config"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, keras.Layer) else "",
)
def test_what_reaches_an_unknown_layer_is_left_by_name(unmeasured, layer, why):
    pruned = prune(model := net(_L.Dense(8, name="kept"), layer, _L.Dense(10, name="cut")), data_for(model))
    assert pruned.kept == {"cut": (5, 10)}
    assert pruned.left["kept"].startswith(why)


def test_quantized_and_lora_layers_are_left_by_name(unmeasured):
    names = ("int8", "before_lora", "lora", "cut")
    model = net(*(_L.Dense(8, name=name) for name in names))
    model.get_layer("int8").quantize("int8")
    model.get_layer("lora").enable_lora(2)
    model.compile("sgd", "mse")
    pruned = prune(model, data_for(model))
    assert pruned.kept == {"cut": (4, 8)}
    assert pruned.left["int8"] == "it is quantized"
    assert pruned.left["before_lora"] == "'lora' (Dense) has LoRA weights"
    assert pruned.left["lora"] == "it has LoRA weights"


@pytest.mark.slow
def test_layers_without_a_rule_are_left_by_name(unmeasured):
    x = keras.Input((5, 6))
    y = _L.LSTM(8, name="lstm")(_L.Dense(8, name="before")(x))
    model = randomized(keras.Model(x, _L.Dense(3, name="logits")(_L.Dense(8, name="cut")(y))))
    model.compile("sgd", "mse")
    pruned = prune(model, data_for(model))
    assert pruned.kept == {"cut": (4, 8)}
    assert pruned.left["lstm"] == "how LSTM computes is not known"
    assert pruned.left["before"] == "'lstm' (LSTM) computes from them what tfopt does not know"


def test_grouped_queries_make_as_many_channels_as_they_read(unmeasured):
    x = keras.Input((4, 6))
    y = _L.Dense(8, name="before")(x)
    y = _L.LayerNormalization(name="norm")(_L.GroupQueryAttention(3, 4, 2, name="grouped")(y, y))
    model = randomized(keras.Model(x, _L.Dense(3, name="logits")(_L.Flatten()(y))))
    model.compile("sgd", "mse")
    pruned = prune(model, data_for(model))
    assert pruned.kept == {"grouped (heads)": (1, 2)}
    assert pruned.left["before"].startswith("'norm' (LayerNormalization) normalizes over them")


def test_constants_and_other_axes_are_left_by_name(unmeasured):
    x = keras.Input((4, 6))
    y = _L.Multiply(name="scale")([_L.Dense(8, name="scaled")(x), np.arange(8.0, dtype="float32").reshape(1, 1, 8)])
    y = _L.Permute((2, 1))(_L.Dense(8, name="turned")(y))
    y = _L.Flatten()(_L.Dense(5, name="cut")(y))
    model = randomized(keras.Model(x, _L.Dense(3, name="logits")(y)))
    model.compile("sgd", "mse")
    pruned = prune(model, data_for(model))
    assert pruned.kept == {"cut": (3, 5)}
    assert pruned.left["scaled"] == "'scale' (Multiply) joins them with an array of as many"
    assert pruned.left["turned"] == "'cut' (Dense) computes along another axis"


@pytest.mark.filterwarnings("ignore:Layer 'inner' .* was passed an input with a mask")
def test_masks_of_time_steps_are_passed_on(unmeasured):
    x = keras.Input((5,), dtype="int32")
    z = keras.Input((5, 6))
    inner = keras.Model(z, _L.BatchNormalization()(_L.Dense(4, name="b")(z)), name="inner")
    y = inner(_L.Dense(6, name="a")(_L.Embedding(7, 8, mask_zero=True, name="words")(x)))
    y = _L.Dense(4, name="c")(_L.Masking()(_L.Dense(4, "relu", name="d")(y)))
    model = randomized(keras.Model(x, _L.Dense(3, name="logits")(_L.GlobalAveragePooling1D()(y))))
    model.compile("sgd", "mse")
    pruned = prune(model, (np.array([[1, 2, 3, 0, 0]] * 4, "int32"), np.ones((4, 3), "float32")))
    assert pruned.kept == {"words": (4, 8), "a": (3, 6), "inner/b": (2, 4), "c": (2, 4)}
    assert pruned.left.keys() == {"d", "logits"}


@pytest.mark.filterwarnings("ignore:.* was passed an input with a mask")
def test_a_nested_model_with_named_inputs_is_followed_behind_a_mask(unmeasured):
    x, beside = keras.Input((5,), dtype="int32"), keras.Input((5, 6))
    z = {"a": keras.Input((5, 6), name="a"), "b": keras.Input((5, 6), name="b")}
    inner = keras.Model(z, _L.Dense(4, name="c")(_L.Add()([z["a"], z["b"]])), name="inner")
    y = inner({"a": _L.Embedding(7, 6, mask_zero=True, name="words")(x), "b": beside})
    model = randomized(keras.Model([x, beside], _L.Dense(3, name="logits")(_L.GlobalAveragePooling1D()(y))))
    model.compile("sgd", "mse")
    inputs = np.array([[1, 2, 3, 0, 0]] * 4, "int32"), np.ones((4, 5, 6), "float32")
    assert prune(model, (inputs, np.ones((4, 3), "float32"))).kept == {"inner/c": (2, 4)}


def test_an_output_inside_is_left_and_partly_joined_channels_are_cut_in_part(unmeasured):
    x = keras.Input((8,))
    both = _L.Concatenate()([_L.Dense(4, name="a")(x), _L.Dense(4, name="b")(x)])
    seen = _L.Dense(4, name="seen")(x)
    y = _L.Add()([both, _L.Concatenate()([seen, _L.Dense(4, name="c")(x)])])
    model = randomized(keras.Model(x, [_L.Dense(3, name="logits")(y), seen]))
    model.compile("sgd", ["mse", None])
    pruned = prune(model, (inputs_of(model, 8), (np.zeros((8, 3), "float32"), np.zeros((8, 4), "float32"))))
    assert pruned.kept == {"b": (2, 4), "c": (2, 4)}
    assert pruned.left["a"] == pruned.left["seen"] == "they are the model's output 'seen'"


@pytest.mark.parametrize("activation", [tf.nn.relu, lambda x: FACTOR * keras.ops.tanh(x)])
def test_activations_that_keras_cannot_name(unmeasured, activation):
    pruned = prune(model := net(_L.Dense(8, activation, name="own"), _L.Dense(10, name="cut")), data_for(model))
    assert pruned.kept["cut"] == (5, 10)
    assert ("own" in pruned.kept) == (activation is tf.nn.relu)


@pytest.mark.slow
@pytest.mark.parametrize("function", [lambda y, p: keras.ops.mean(FACTOR * (y - p) ** 2, -1)])
def test_a_loss_and_a_metric_of_the_users(unmeasured, function):
    new = prune(model := net(_L.Dense(8), loss=function, metrics=[function]), data_for(model)).model
    x, y = data_for(model)
    expected = pytest.approx(float(keras.ops.mean(function(y, new.predict(x, verbose=0)))), rel=1e-5)
    assert new.evaluate(x, y, verbose=0) == [expected, expected]


def test_functional_classes(unmeasured):
    x = keras.Input((6,))
    own = WithOwnStep(x, _L.Dense(3)(_L.Dense(8)(x)))
    for model in (own, Wrapped()):
        model.compile("sgd", "mse")
        new = prune(model, data_for(model)).model
        assert new.count_params() < model.count_params()
        assert type(new) is (WithOwnStep if model is own else type(keras.Model(x, x)))


def test_models_that_cannot_be_cut():
    for model, message in (
        (WithOwnCall(name="net"), "class WithOwnCall has its own call. Make a Functional model of its layers\\."),
        (WrappedWithStep(), "class WrappedWithStep has its own 'train_step'. Let its __init__ take inputs and outputs"),
        (
            keras.Sequential([keras.Input((6,)), _L.Dense(3, name="out")]),
            "out: they are the model's .*Leave it as it is",
        ),
    ):
        model.compile("sgd", "mse")
        model(np.zeros((1, 6), "float32"))
        with pytest.raises(UnsupportedError, match=message):
            prune(model, (np.zeros((4, 6), "float32"), np.zeros((4, 3), "float32")))


def test_wrong_arguments(unmeasured):
    model = net(_L.Dense(8))
    data = data_for(model)
    compiled_without_optimizer = net(_L.Dense(8), optimizer=None)
    for arguments, error, message in (
        (("net", data), TypeError, "Expected a keras.Model"),
        ((keras.Sequential(name="bare"), data), ValueError, "'bare', which is not compiled"),
        ((model, data[0]), TypeError, "Expected a tf.data.Dataset of batches or one batch"),
        ((model, tf.data.Dataset.from_tensors(data).take(0)), PipelineError, "at least one batch"),
        ((model, data, 1.0), ValueError, "Expected sparsity to be below 1. Received: 1.0. Pass a share such as 0.5"),
        ((model, data, 0), ValueError, "Expected sparsity to be above 0"),
        ((model, data, "half"), TypeError, "Expected sparsity to be a number"),
        ((model, data[:1]), ValueError, r"Received: \('float32 \(8, 6\)',\). It raises: .* Pass data that model.evalu"),
        ((model, (data[0], data[1][:, :2])), ValueError, "'net' can be evaluated. Received: .*float32 \\(8, 2\\)"),
        ((model, (data[0][:0], data[1][:0])), PipelineError, "batches of at least one example"),
        ((model, (*data, np.zeros(8))), TfoptError, "Found: all of them are zero. Train the model first"),
        ((compiled_without_optimizer, data), ValueError, "Expected a model with an optimizer"),
        ((model, (data[0], np.full_like(data[1], np.nan))), TfoptError, "importance='norm'"),
    ):
        with pytest.raises(error, match=message):
            prune(*arguments)
    with pytest.raises(ValueError, match=r"Expected an importance: 'taylor' or 'norm'. Received: 'size'"):
        prune(model, data, importance="size")
    unbuilt = keras.Sequential([_L.Dense(3)], name="unbuilt")
    unbuilt.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"'unbuilt', which has no weights yet\. Call it on one batch first"):
        prune(unbuilt, data)


def test_endless_data_are_refused(unmeasured):
    model = net(_L.Dense(8))
    with pytest.raises(ValueError, match=r"Pass data.take\(n\)"):
        prune(model, tf.data.Dataset.from_tensors(data_for(model)).repeat())


class Forgetful(keras.layers.Layer):
    """Its config leaves its factor out."""

    def __init__(self, factor=1.0, **options):
        super().__init__(**options)
        self.factor = factor

    def call(self, x):
        return self.factor * x

    def get_config(self):
        return super(keras.layers.Layer, self).get_config()


def test_a_clone_that_computes_something_else_is_refused(unmeasured):
    model = net(_L.Dense(8), Forgetful(2.0, name="forgetful"), _L.Dense(8))
    with pytest.raises(UnsupportedError, match="Expected a clone to compute what it should"):
        prune(model, data_for(model))


def test_the_old_model_can_be_saved_as_before_and_the_new_one_can_be_saved(unmeasured, tmp_path):
    model = NETS["two_ways"]()
    model.compile("sgd", {"kind": "mse", "size": "mae"})
    before = model.get_config()
    x = inputs_of(model)
    y = {"kind": np.zeros((3, 3), "float32"), "size": np.zeros((3, 1), "float32")}
    new = prune(model, (x, y)).model
    assert model.get_config() == before
    new.save(tmp_path / "new.keras")
    loaded = keras.models.load_model(tmp_path / "new.keras")
    for name, truth in new(x).items():
        np.testing.assert_allclose(loaded(x)[name], truth, rtol=1e-5, atol=1e-6)


APPLICATIONS = ("MobileNetV2", "ResNet50", "EfficientNetB0")


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(unmeasured, name):
    x = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype("float32")
    options = {"classes": 3, "input_shape": (32, 32, 3), "classifier_activation": None}
    model = getattr(keras.applications, name)(weights=None, **options)
    model.compile("sgd", "mse")
    pruned = prune(model, (x, np.ones((2, 3), "float32")), importance="norm")
    assert list(pruned.left) == ["predictions"]
    assert pruned.reached == pytest.approx(0.5, abs=0.02)
    assert pruned.after.parameters < 0.32 * pruned.before.parameters
