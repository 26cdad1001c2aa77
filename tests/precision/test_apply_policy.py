import json
from contextlib import contextmanager

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, small_net, state
from quick import first_quick
from versions import make_unknown

from tfopt import precision, repairs
from tfopt.errors import UnsupportedError
from tfopt.precision import apply

layers, ops = keras.layers, keras.ops
Map = keras.dtype_policies.DTypePolicyMap
Scaled = keras.optimizers.LossScaleOptimizer
random = np.random.default_rng(0)
SEQUENCES = random.normal(size=(4, 3, 8)).astype("float32")
IMAGES = random.normal(size=(4, 8, 8, 3)).astype("float32")
IDS = random.integers(20, size=(4, 3)).astype("int32")


def functional(x, build):
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    return keras.Model(inputs, build(inputs))


def head(x, units=3):
    return layers.Dense(units, dtype="float32")(x)


def attention(x):
    y = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=3)(x, x)
    x = layers.LayerNormalization()(x + y)
    return head(keras.ops.mean(layers.EinsumDense("btc,cd->btd", (None, 4))(x), axis=1))


def recurrent(x):
    x = layers.Embedding(20, 8, mask_zero=True)(x)
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.TimeDistributed(layers.Dense(5, activation="tanh"))(x)
    return head(layers.GRU(4, recurrent_dropout=0.1, seed=4)(x))


def convolutional(x):
    x = layers.Rescaling(0.5, offset=0.1)(x)
    x = layers.Conv2D(4, 3, use_bias=False)(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3, seed=5)(keras.ops.relu(x))
    x = layers.SeparableConv2D(4, 3)(layers.GroupNormalization(2)(x))
    return head(layers.GlobalAveragePooling2D()(x))


def shared(x):
    """One layer called twice, a nested model, two outputs."""
    dense = layers.Dense(8, activation="gelu")
    nested = keras.Sequential([keras.Input((3, 8)), layers.Dense(8), layers.RMSNormalization()])
    x = nested(dense(dense(x))) + 1.0
    return [head(layers.Flatten()(x)), keras.ops.softmax(head(x[:, 0]) * 2)]


def unlike(x):
    """Layers of unlike dtypes put together; heads named as no others, since the policy of one is asked for."""
    whole = layers.Dense(4, dtype="float32", name="whole")(x)
    halves = layers.Dense(4, dtype="mixed_float16", name="halves")(whole)
    return head(layers.Flatten()(layers.Concatenate()([x, whole, layers.Add()([whole, halves])])))


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = layers.Dense(8)
        self.norm = layers.BatchNormalization()

    def call(self, inputs, training=False):
        return keras.ops.relu(self.norm(self.inner(inputs), training=training)) + inputs


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.cells = layers.RNN([layers.LSTMCell(4), layers.GRUCell(3)])
        self.head = layers.Dense(3, dtype="float32")

    def call(self, inputs, training=False):
        return keras.ops.softmax(self.head(self.cells(self.block(inputs, training=training))))


def subclassed():
    model = Subclassed()
    model(SEQUENCES)
    return model


ZOO = {
    "attention": (SEQUENCES, lambda: functional(SEQUENCES, attention)),
    "recurrent": (IDS, lambda: functional(IDS, recurrent)),
    "convolutional": (IMAGES, lambda: functional(IMAGES, convolutional)),
    "shared": (SEQUENCES, lambda: functional(SEQUENCES, shared)),
    "unlike": (SEQUENCES, lambda: functional(SEQUENCES, unlike)),
    "subclassed": (SEQUENCES, subclassed),
}


def made(build, policy):
    with precision.policy(policy):
        model = build()
    targets = len(model.outputs) if hasattr(model, "outputs") else 1
    repairs.install("loss_scaling")
    # Eager: one step is sooner run than traced.
    model.compile(keras.optimizers.SGD(0.1), "mse" if targets == 1 else ["mse"] * targets, run_eagerly=True)
    return model


def outputs_of(model, x):
    return [output.numpy() for output in keras.tree.flatten(model(x, training=False))]


def give(source, target):
    """Weights, and the seeds of dropout."""
    for one, two in zip(target.variables, source.variables, strict=True):
        one.assign(two)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    first_quick(
        [*((name, "mixed_float16") for name in ZOO), ("shared", "mixed_bfloat16"), ("unlike", "mixed_bfloat16")], 3
    ),
)
def test_it_computes_as_a_model_made_under_the_policy_and_back_again(name, policy):
    x, build = ZOO[name]
    applied, native, untouched = made(build, "float32"), made(build, policy), made(build, "float32")
    for model in (untouched, applied):
        apply(model, "float32")  # one layer of "unlike" is made in 16 bits
    apply(applied, {".*": policy, "whole": "float32", "halves": "mixed_float16"} if name == "unlike" else policy)
    for model in (native, untouched):
        give(applied, model)
    expected, plain = outputs_of(native, x), outputs_of(untouched, x)
    for received, mixed, full in zip(outputs_of(applied, x), expected, plain, strict=True):
        assert received.dtype == "float32"
        assert received.tobytes() == mixed.tobytes()
        assert received.tobytes() != full.tobytes()
    y = [np.random.default_rng(1).normal(size=output.shape) for output in plain]
    for model in (applied, native):
        model.train_on_batch(x, y if len(y) > 1 else y[0])
    # A GPU adds gradients up in another order each time.
    tolerance = 0.01 if tf.config.list_physical_devices("GPU") else 0
    for (path, one), (_, other) in zip(state(native), state(applied), strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance, err_msg=path)

    give(untouched, applied)
    apply(applied, "float32")
    for received, full in zip(outputs_of(applied, x), outputs_of(untouched, x), strict=True):
        assert received.tobytes() == full.tobytes()


@contextmanager
def noting_dtypes(layer):
    """The dtypes of inputs that a layer is traced with."""
    seen, call = [], layer.call
    layer.__dict__["call"] = lambda x: seen.append(x.dtype.name) or call(x)
    yield seen
    del layer.__dict__["call"]


def fitted(**options):
    model = small_net(jit_compile=False, **options)
    model.fit(*batch(), verbose=0)
    return model


@pytest.mark.slow
def test_a_fitted_model_goes_on_under_the_policy_and_loses_no_state():
    model = fitted()
    adam = model.optimizer
    variables = [*model.variables, *model.metrics_variables, *adam.variables]
    before = [variable.numpy().tobytes() for variable in variables]
    assert apply(model, "mixed_float16").loss_scaled
    assert isinstance(model.optimizer, Scaled)
    assert model.optimizer.inner_optimizer is adam
    now = [*model.variables, *model.metrics_variables, *adam.variables]
    assert all(one is two for one, two in zip(variables, now, strict=True))
    assert [variable.numpy().tobytes() for variable in variables] == before

    with noting_dtypes(model.layers[0]) as seen:
        model.fit(*batch(), verbose=0)
        model.evaluate(*batch(), verbose=0)
        model.predict(batch()[0], verbose=0)
    assert set(seen) == {"float16"}
    assert len(seen) >= 3  # each is traced anew
    assert adam.iterations.numpy() == 2
    assert apply(model, "float32").loss_scaled is False
    assert model.optimizer is adam
    with noting_dtypes(model.layers[0]) as seen:
        model.fit(*batch(), verbose=0)
    assert set(seen) == {"float32"}
    assert adam.iterations.numpy() == 3


@pytest.mark.slow
def test_compile_options_and_a_user_s_wrapper_are_respected():
    model = fitted(optimizer=Scaled(keras.optimizers.Adam(), initial_scale=8.0))
    wrapper = model.optimizer
    assert apply(model, "mixed_float16").loss_scaled
    assert apply(model, "float32").loss_scaled
    assert model.optimizer is wrapper

    repairs.install("loss_scaling")  # which keeps the option
    model = fitted(auto_scale_loss=False)
    assert apply(model, "mixed_float16").loss_scaled is False
    assert not isinstance(model.optimizer, Scaled)


@pytest.mark.parametrize("repaired", [False, True])
def test_a_wrapper_that_compile_put_there_is_taken_off_and_kept_in_the_compile_options(repaired):
    if repaired:
        repairs.install("loss_scaling")
    keras.config.set_dtype_policy("mixed_float16")
    model = small_net("mixed_float16", jit_compile=False)
    wrapper = model.optimizer
    assert isinstance(wrapper, Scaled)
    apply(model, "mixed_float16")
    assert model.optimizer is wrapper is model._compile_config.config["optimizer"]
    apply(model, "mixed_bfloat16")
    assert model.optimizer is wrapper.inner_optimizer is model._compile_config.config["optimizer"]


def test_an_uncompiled_model_is_scaled_when_it_is_compiled():
    model = small_net(compiled=False)
    assert apply(model, "mixed_float16").loss_scaled is None
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, Scaled)


class Unguarded(keras.optimizers.Optimizer):
    """As in Keras' own example of an optimizer: build does not ask whether it was built."""

    def build(self, variables):
        super().build(variables)
        self.momentums = [self.add_variable_from_reference(v, name="momentum") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(learning_rate * gradient)


@pytest.mark.slow
def test_slots_are_not_made_twice():
    model = fitted(optimizer=Unguarded(0.1))
    count = len(model.optimizer.variables)
    apply(model, "mixed_float16")
    assert len(model.optimizer.inner_optimizer.variables) == count


def set_later(model):
    for layer in model.layers[:-1]:
        layer.dtype_policy = "mixed_float16"
    return model


def made_per_layer(model):
    return small_net("mixed_float16", compiled=False)


def made_with_a_map(model):
    return small_net(Map("mixed_float16"), compiled=False)


def cloned(model):
    return keras.models.clone_model(small_net("mixed_float16", compiled=False))


@pytest.mark.parametrize("make", [set_later, made_per_layer, made_with_a_map, cloned])
def test_float16_without_loss_scaling_is_stock_keras_and_apply_mends_it(make):
    """D7: compile goes by the model's own policy, which is the global one when it was made."""
    model = make(small_net(compiled=False))
    assert model.layers[0].compute_dtype == "float16"
    compile_options = {"loss": "mse", "jit_compile": False}
    model.compile("adam", **compile_options)
    assert not isinstance(model.optimizer, Scaled)  # stock
    inner = model.optimizer
    assert apply(model, "mixed_float16").loss_scaled
    assert model.optimizer.inner_optimizer is inner
    repairs.install("loss_scaling")
    model.compile("adam", **compile_options)
    assert isinstance(model.optimizer, Scaled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "error"),
    [("mixed", ValueError), ("float16", UnsupportedError), ({"conv2d_none": "float32"}, ValueError)],
)
def test_what_is_refused_changes_nothing(policy, error):
    model = fitted()
    before = [(layer, layer._dtype_policy) for layer in model._flatten_layers()]
    functions, optimizer = model.train_function, model.optimizer
    with pytest.raises(error):
        apply(model, policy)
    assert all(layer._dtype_policy is its for layer, its in before)
    assert (model.train_function, model.optimizer) == (functions, optimizer)


@pytest.mark.slow
def test_an_unknown_keras_is_refused_before_anything_changes(monkeypatch):
    make_unknown(monkeypatch, repairs.LOSS_SCALING)
    model = fitted()
    with pytest.raises(UnsupportedError, match="loss_scaling"):
        apply(model, "mixed_float16")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert not isinstance(model.optimizer, Scaled)
    assert set(apply(model, "mixed_bfloat16").changed.values()) == {"mixed_bfloat16"}


def test_what_was_changed_reads_well():
    model = small_net(jit_compile=False)
    conv = model.layers[0].name
    applied = apply(model, {conv: "mixed_float16"})
    assert str(applied) == "Changed 1 layer to mixed_float16; the loss is scaled."
    assert json.loads(json.dumps(applied.to_dict())) == {
        "changed": {conv: "mixed_float16"},
        "scaling": {f"'optimizer' of {model.name!r}": True},
        "loss_scaled": True,
        "unsaved": [],
        "float8": [],
    }
    assert str(apply(model, {conv: "mixed_float16"})) == "Changed nothing; the loss is scaled."
    assert str(apply(small_net(compiled=False), "mixed_bfloat16")) == "Changed 5 layers to mixed_bfloat16."


class TokensAndPositions(layers.Layer):
    """Adds its parts' outputs as they come, as KerasHub's TokenAndPositionEmbedding does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.tokens = layers.ReversibleEmbedding(20, 8)
        self.positions = layers.Embedding(3, 8)

    def build(self, shape):
        self.tokens.build(shape)
        self.positions.build((3,))

    def call(self, ids):
        return self.tokens(ids) + self.positions(ops.arange(3))


class Logits(layers.Layer):
    """A head that multiplies with an embedding that it is given."""

    def __init__(self, tokens):
        super().__init__(name="logits")
        self.tokens, self.dense = tokens, layers.Dense(8, name="head_dense")

    def call(self, x):
        return self.tokens(self.dense(x), reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("in_a_head", [False, True])
def test_what_holds_a_tied_embedding_stays_in_float32_with_it(in_a_head):
    def build(ids):
        embedding = TokensAndPositions(name="embedding")
        x = layers.Dense(8, name="body")(embedding(ids))
        return Logits(embedding.tokens)(x) if in_a_head else embedding.tokens(x, reverse=True)

    model = functional(IDS, build)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    assert precision.check(model, (IDS, IDS), "mixed_bfloat16").passed
    apply(model, "mixed_bfloat16")
    assert model.get_layer("embedding").compute_dtype == "float32"
    assert model.get_layer("embedding").positions.compute_dtype == "float32"
    assert model.get_layer("body").compute_dtype == "bfloat16"
    assert np.isfinite(model.fit(IDS, IDS, verbose=0).history["loss"]).all()
    assert model(IDS).dtype == "float32"


def test_what_holds_an_output_layer_alone_changes():
    class Head(layers.Layer):
        def __init__(self):
            super().__init__(name="block")
            self.hidden, self.out = layers.Dense(8), layers.Dense(3)

        def call(self, x):
            return self.out(self.hidden(x))

    model = functional(SEQUENCES, lambda x: Head()(x))
    apply(model, "mixed_bfloat16")
    block = model.get_layer("block")
    assert (block.hidden.compute_dtype, block.out.compute_dtype) == ("bfloat16", "float32")
