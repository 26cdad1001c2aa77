"""Keras' attention layers through cuDNN: which calls take it, which do not, and what comes out."""

import json
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, state
from plain_attention import (
    LENGTH,
    Block,
    attention_batch,
    attention_net,
    fixed,
    heads_net,
    largest_error,
    rounding,
)
from quick import first_quick
from versions import since_keras

from tfopt.kernels import explain, undo, use_flash_attention
from tfopt.kernels.cudnn import support
from tfopt.warn import forget_warnings

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
LAYERS = keras.layers
BFLOAT16 = rounding("bfloat16", LENGTH)  # of one attention: its sums run over the sequence
POSITIONS = 4 * LENGTH  # terms of the longest sum: a weight's gradient adds up every position of the batch


def paths(model):
    """Each attention layer's obstacles while training and otherwise, by the layer's name."""
    return {row.layer.split("/")[-1]: (row.training, row.inference) for row in explain(model).layers}


def fit(model, dataset=None):
    model.fit(dataset or fixed(), shuffle=False, verbose=0)


@pytest.mark.slow
def test_training_runs_through_cudnn_forward_and_backward(cudnn):
    plain, flash = attention_net(jit_compile=False), attention_net()
    assert use_flash_attention(flash) == 2
    begun = [value for _, value in state(plain)]
    fit(plain)
    assert not cudnn.calls
    fit(flash)
    assert cudnn.targets == [FORWARD, FORWARD, BACKWARD, BACKWARD]
    assert [config["mask_type"] for _, config in cudnn.calls] == ["CAUSAL", "NO_MASK", "NO_MASK", "CAUSAL"]
    assert [config["fmha_scale"] for _, config in cudnn.calls] == pytest.approx([8**-0.5] * 4)
    trained = len(plain.trainable_variables)
    largest_change = max(
        np.linalg.norm(value - before) for before, (_, value) in zip(begun[:trained], state(plain), strict=False)
    )
    for place, ((name, one), (_, other)) in enumerate(zip(state(flash), state(plain), strict=True)):
        scale = largest_change if place < trained else np.linalg.norm(other)
        assert np.linalg.norm(one - other) <= rounding("bfloat16", POSITIONS) * scale, name
    assert paths(flash) == {"heads": ((), None), "grouped": ((), None)}


@pytest.mark.slow
def test_a_fitted_model_changes_with_its_next_step(cudnn, uncompiled):
    model = heads_net(jit_compile=False)

    def run_all():
        fit(model)
        model.evaluate(fixed(), verbose=0)
        model.predict(fixed(), verbose=0)

    run_all()
    assert use_flash_attention(model) == 1
    run_all()
    assert cudnn.targets == [FORWARD, BACKWARD, FORWARD, FORWARD]
    assert paths(model) == {"heads": ((), ())}
    assert undo(model) == 1
    run_all()
    assert len(cudnn.calls) == 4
    assert undo(model) == 0


@pytest.mark.slow
def test_gradients_of_a_model_are_those_of_float32(cudnn, uncompiled):
    inputs, targets = attention_batch()

    def gradients(policy, change):
        model = attention_net(policy, jit_compile=False)
        change(model)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        return [gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)]

    exact = gradients("float32", undo)
    assert not cudnn.calls
    scale = max(np.linalg.norm(gradient) for gradient in exact)
    for dtype in ("bfloat16", "float16"):
        flash = gradients(f"mixed_{dtype}", use_flash_attention)
        error = max(np.linalg.norm(one - other) for one, other in zip(flash, exact, strict=True))
        assert error < rounding(dtype, POSITIONS) * scale
    assert len(cudnn.calls) == 8


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "dropout", "jit_compile"), [("float32", 0.3, False), ("mixed_bfloat16", 0.0, True)])
def test_without_a_gpu_all_is_the_same_bits(monkeypatch, policy, dropout, jit_compile):
    monkeypatch.setattr(support, "compute_capabilities", list)
    plain, flash = (heads_net(policy, jit_compile=jit_compile, dropout=dropout) for _ in range(2))
    assert use_flash_attention(flash) == 1
    for model in (plain, flash):
        fit(model)
    assert_same_state(state(plain), state(flash))
    inputs = attention_batch()[0]
    assert plain(inputs).numpy().tobytes() == flash(inputs).numpy().tobytes()
    assert all("no GPU" in found for row in paths(flash).values() for found in row)


class Calls(LAYERS.Layer):
    """One attention layer, called as asked for."""

    def __init__(self, attention, **options):
        super().__init__(dtype="bfloat16")
        self.supports_masking = True
        self.attention = attention
        self.options = options

    def call(self, inputs, training=None):
        result = self.attention(inputs, inputs, training=training, **self.options)
        return result[0] if isinstance(result, tuple) else result


def heads(**options):
    return LAYERS.MultiHeadAttention(**{"num_heads": 2, "key_dim": 8, "dtype": "bfloat16"} | options)


def grouped(**options):
    return LAYERS.GroupQueryAttention(
        **{"head_dim": 8, "num_query_heads": 2, "num_key_value_heads": 1, "dtype": "bfloat16"} | options
    )


CAUSAL = {"use_causal_mask": True}
MASK = {"attention_mask": np.tri(LENGTH, dtype=bool)[None]}
SCORES = {"return_attention_scores": True}
RANDOM = {"attention_mask": np.random.default_rng(4).random((4, LENGTH, LENGTH)) < 0.2}
PADDING = {"attention_mask": np.tri(4, LENGTH, 50, dtype=bool)[:, None]}
NONE_LEFT = {"attention_mask": np.array([[[True]], [[False]], [[True]], [[False]]]) & np.ones(LENGTH, bool)}
CASES = {
    # layer, its options, those of the call, cuDNN's form or what keeps the layer from it
    "full": (heads, {}, {}, "NO_MASK"),
    "causal": (heads, {}, CAUSAL, "CAUSAL"),
    "groups": (grouped, {"num_query_heads": 4, "num_key_value_heads": 2}, CAUSAL, "CAUSAL"),
    "mask and causal": (heads, {}, RANDOM | CAUSAL, "CAUSAL with a bias"),
    "scores": (heads, {}, SCORES, ("scores to be returned",)),
    "value size": (heads, {"value_dim": 16}, {}, ("keys of size 8 with values of size 16",)),
    "gate": (heads, {"use_gate": True}, CAUSAL, "CAUSAL"),
    "mask": (heads, {}, RANDOM, "NO_MASK with a bias"),
    "padding": (heads, {}, PADDING, "NO_MASK with a bias"),
    "nothing to attend to": (heads, {}, NONE_LEFT, "NO_MASK with a bias"),
    "nothing to attend to, dropout": (heads, {"dropout": 0.3}, NONE_LEFT, "NO_MASK with a bias"),
    "a causal mask given": (heads, {}, MASK, "CAUSAL"),
    "it, and causal": (heads, {}, MASK | CAUSAL, "CAUSAL"),
    "dropout, mask": (heads, {"dropout": 0.3}, RANDOM | CAUSAL, "CAUSAL with a bias"),
    "window": (heads, {"sliding_window": 4}, CAUSAL, "CAUSAL, 4 back"),
    "window on both sides": (heads, {"sliding_window": 4}, {}, "NO_MASK with a bias"),
    "window, mask": (heads, {"sliding_window": 4}, RANDOM | CAUSAL, "CAUSAL, 4 back with a bias"),
    "heads as axis": (heads, {"attention_axes": -1, "dropout": 0.3}, {}, ("a sequence of 2, below 64",)),
    "sequence as axis": (heads, {"attention_axes": -2, "dropout": 0.3}, {}, "NO_MASK"),
    "float32": (heads, {"dtype": "float32"}, {}, ("float32, where cuDNN takes bfloat16 or float16",)),
    "groups, full": (grouped, {}, {}, "NO_MASK"),
    "groups, mask": (grouped, {}, RANDOM | CAUSAL, "CAUSAL with a bias"),
    "groups, window": (grouped, {"sliding_window": 4}, {}, "NO_MASK with a bias"),
    "groups, scores": (grouped, {}, SCORES | CAUSAL, ("scores to be returned",)),
}


def forms(cudnn):
    """What was asked of cuDNN."""
    for target, config in cudnn.calls:
        window = config["sliding_window_length"]
        bias = " with a bias" if "Bias" in target else ""
        yield config["mask_type"] + (f", {window} back" if window else "") + bias


@pytest.mark.parametrize("case", first_quick(CASES, 6))
def test_each_call_computes_what_keras_computes(cudnn, uncompiled, case):
    make, layer_options, call_options, form = CASES[case]
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((LENGTH, 16)), Calls(make(**layer_options), **call_options)])
    inputs = attention_batch()[0]
    expected = traced(model, inputs)
    assert use_flash_attention(model) == 1
    found = traced(model, inputs)
    taken = isinstance(form, str)
    if not taken:
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert largest_error([tf.cast(found, tf.float64).numpy()], [tf.cast(expected, tf.float64).numpy()]) < BFLOAT16
    assert [*forms(cudnn)] == ([form] if taken else [])
    assert [row.inference for row in explain(model).layers] == [() if taken else form]


def traced(model, *inputs):
    return tf.function(model, autograph=False)(*inputs)


def test_attention_over_several_axes_stays_plain(cudnn, uncompiled):
    model = keras.Sequential([keras.Input((4, LENGTH, 16)), Calls(heads())])
    use_flash_attention(model)
    traced(model, tf.ones((2, 4, LENGTH, 16)))
    assert [row.inference for row in explain(model).layers] == [
        ("no softmax of a product that is multiplied with a third tensor",)
    ]


@pytest.mark.parametrize("side", ["left", "right", "everywhere"])
def test_padding_masks(cudnn, uncompiled, side):
    """The padding of an embedding; one example is padding alone."""
    tokens = np.random.default_rng(0).integers(1, 5, size=(4, LENGTH))
    for row, length in enumerate((0, 9, 40, 63)):
        tokens[row, slice(LENGTH - length) if side == "left" else slice(length, None)] = 0
    if side == "everywhere":
        tokens[:] = 0
    embedding = LAYERS.Embedding(5, 16, mask_zero=True, dtype="bfloat16")
    model = keras.Sequential([keras.Input((LENGTH,)), embedding, Calls(heads(), use_causal_mask=True)])
    expected = traced(model, tokens)
    use_flash_attention(model)
    found = traced(model, tokens)
    assert largest_error([tf.cast(found, tf.float64).numpy()], [tf.cast(expected, tf.float64).numpy()]) < BFLOAT16
    assert [*forms(cudnn)] == ["CAUSAL with a bias"]


@pytest.mark.slow
def test_dropout_keeps_training_plain_and_evaluation_not(cudnn, uncompiled):
    model = heads_net(jit_compile=False, dropout=0.3)
    plain_loss = model.evaluate(fixed(), verbose=0)
    use_flash_attention(model)
    assert model.evaluate(fixed(), verbose=0) == pytest.approx(plain_loss, rel=BFLOAT16)
    assert cudnn.targets == [FORWARD]
    fit(model)
    assert cudnn.targets == [FORWARD]
    assert paths(model) == {"heads": (("dropout",), ())}


def test_a_batch_of_unknown_size_stays_plain(cudnn, uncompiled):
    model = heads_net(jit_compile=False)
    use_flash_attention(model)
    fit(model, tf.data.Dataset.from_tensor_slices(attention_batch()).batch(4))
    assert not cudnn.calls
    assert paths(model)["heads"][0] == ("a batch of no fixed size",)


def test_without_xla_it_stays_plain(cudnn):
    model = heads_net(jit_compile=False, dropout=0.3)
    use_flash_attention(model)
    assert paths(model) == {"heads": (("XLA is off", "dropout"), ("XLA is off",))}
    fit(model)
    assert not cudnn.calls
    assert paths(model) == {"heads": (("not compiled by XLA", "dropout"), ("XLA is off",))}


class Own(LAYERS.MultiHeadAttention):
    """A subclass with an attention of its own."""

    def _compute_attention(self, query, key, value, *arguments, **options):
        return value, None


class OwnCausalMask(LAYERS.MultiHeadAttention):
    """A subclass whose mask Keras asks for where the layer has dropout."""

    def _compute_causal_mask(self, query, value=None):
        return tf.ones_like(super()._compute_causal_mask(query, value))


class OwnSoftmax(LAYERS.MultiHeadAttention):
    """A subclass that replaces what the scores go through where the layer has dropout."""

    def _build_attention(self, rank):
        super()._build_attention(rank)
        self._softmax = LAYERS.Softmax(axis=-2, dtype=self.dtype_policy)


class Inheriting(LAYERS.MultiHeadAttention):
    """A subclass that leaves the attention to Keras."""


def test_a_layer_that_computes_something_else_does_not_change():
    blocks = [Block(kind(2, 8)) for kind in (Own, Inheriting, LAYERS.MultiHeadAttention)]
    model = keras.Sequential([keras.Input((LENGTH, 16)), keras.Sequential(blocks)])
    assert use_flash_attention(model) == 2
    assert use_flash_attention(model) == 0
    assert str(explain(model).layers[0]).endswith("plain (Own computes attention in a way that is not recognized)")
    without = keras.Sequential([keras.Input((2,)), LAYERS.Dense(2)])
    assert use_flash_attention(without) == 0
    assert str(explain(without)) == "The model has no layer for which there is a kernel."


class AttentionBlock(Block):
    """A layer that is called attention, and leaves it to another."""


def test_a_block_is_not_taken_for_its_attention():
    model = keras.Sequential([keras.Input((LENGTH, 16)), AttentionBlock(heads(name="heads"), dtype="bfloat16")])
    assert [*paths(model)] == ["heads"]
    use_flash_attention(model)
    assert [*paths(model)] == ["heads"]


@pytest.mark.parametrize("kind", [LAYERS.Attention, LAYERS.AdditiveAttention])
def test_attention_of_another_kind_is_named(cudnn, kind):
    query, key = keras.Input((LENGTH, 16)), keras.Input((LENGTH, 16))
    model = keras.Model([query, key], kind(name="other")([query, key]))
    assert use_flash_attention(model) == 0
    reason = f"{kind.__name__} computes attention in a way that is not recognized"
    assert paths(model) == {"other": ((reason,), (reason,))}


# Before Keras 3.14 such a class makes its mask in a way that is not recognized.
OWN_MASK = pytest.param(OwnCausalMask, ["NO_MASK"], marks=since_keras("3.14"))


@pytest.mark.parametrize(("kind", "taken"), [OWN_MASK, (OwnSoftmax, [])])
def test_what_a_subclass_does_in_layers_with_dropout_is_kept(cudnn, uncompiled, kind, taken):
    model = keras.Sequential([keras.Input((LENGTH, 16)), Calls(kind(2, 8, dropout=0.3, dtype="bfloat16"), **CAUSAL)])
    inputs = attention_batch()[0]
    expected = traced(model, inputs)
    assert use_flash_attention(model) == 1
    found = traced(model, inputs)
    assert largest_error([tf.cast(found, tf.float64).numpy()], [tf.cast(expected, tf.float64).numpy()]) < BFLOAT16
    assert [*forms(cudnn)] == taken


@pytest.mark.slow
def test_a_scale_that_was_set_later_counts(cudnn, uncompiled):
    model = keras.Sequential([keras.Input((LENGTH, 16)), Calls(heads()), Calls(grouped())])
    use_flash_attention(model)
    one, other = (calls.attention for calls in model.layers)
    one._inverse_sqrt_key_dim, other._inverse_sqrt_head_dim = 0.5, 2.0
    found = model(attention_batch()[0])
    assert [config["fmha_scale"] for _, config in cudnn.calls] == [0.5, 2.0]
    undo(model)
    expected = model(attention_batch()[0])
    assert largest_error([tf.cast(found, tf.float64).numpy()], [tf.cast(expected, tf.float64).numpy()]) < 2 * BFLOAT16


@pytest.mark.slow
def test_a_layer_that_a_model_calls_twice_is_explained_by_both_calls(cudnn, uncompiled):
    shared, inputs = heads(), [keras.Input((None, 16)), keras.Input((None, 16))]
    model = keras.Model(inputs, [shared(part, part) for part in inputs])
    use_flash_attention(model)
    call, rows = tf.function(model, autograph=False), attention_batch()[0]
    for lengths, reasons in [
        ((64, 32), ("in some calls: a sequence of 32, below 64",)),
        ((40, 64), ("in some calls: a sequence of 40, below 64",)),
        ((64, 64), ()),
        ((32, 40), ("a sequence of 32, below 64", "a sequence of 40, below 64")),
    ]:
        call([rows[:, :length] for length in lengths])
        assert [set(row.inference) for row in explain(model).layers] == [set(reasons)]


def test_neither_files_nor_clones_know_of_it(tmp_path):
    model = heads_net()
    config = model.to_json()
    use_flash_attention(model)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as archive:
        assert b"tfopt" not in archive.read("config.json")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert model.to_json() == config
    assert_same_state(state(model), state(loaded))
    for copy in (loaded, keras.models.clone_model(model)):
        assert paths(copy) == {"heads": (("not requested: use_flash_attention(model)",),) * 2}
        assert undo(copy) == 0
    assert undo(model) == 1


@pytest.mark.slow
def test_an_export_holds_keras_path(cudnn, tmp_path):
    """It is written where the model runs through cuDNN, and runs where there is none."""
    model = heads_net()
    use_flash_attention(model)
    inputs = attention_batch()[0]
    model.predict(tf.data.Dataset.from_tensors(inputs), verbose=0)
    assert len(cudnn.calls) == 1
    # A fixed shape: it is not the shape that keeps cuDNN away.
    signature = [keras.InputSpec(shape=(4, LENGTH, 16), dtype="float32")]
    model.export(tmp_path / "exported", verbose=False, input_signature=signature)
    assert b"XlaCallModule" not in (tmp_path / "exported" / "saved_model.pb").read_bytes()
    assert paths(model) == {"heads": (None, ("not compiled by XLA",))}
    undo(model)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_array_equal(loaded.serve(inputs), tf.function(model)(inputs))


def test_models_that_it_does_not_take():
    for function in (use_flash_attention, explain, undo):
        with pytest.raises(TypeError, match=r"Expected a keras.Model. Received: 'gpt' of type str. Pass the model."):
            function("gpt")


def test_a_model_that_is_not_compiled(cudnn):
    model = attention_net(compiled=False)
    assert use_flash_attention(model) == 2
    model.jit_compile = True
    model(
        keras.Input((LENGTH, 16), batch_size=4, dtype="bfloat16")
    )  # Keras calls the layers with symbols: no trace of a step
    found = explain(model)
    assert [(row.training, row.inference) for row in found.layers] == [(None, None)] * 2
    assert str(found).endswith("grouped: flash attention if a step's shapes and masks allow (not traced yet)")
    assert [row.layer for row in found.layers] == ["block/heads", "grouped"]
    first = json.loads(json.dumps(found.to_dict()))["layers"][0]
    assert first.keys() == {"layer", "kernel", "training", "inference"}
    assert first["kernel"] == "flash attention"


def test_where_cudnn_cannot_be_taken_is_said_once(caplog, monkeypatch):
    forget_warnings()
    monkeypatch.setattr(support, "compute_capabilities", lambda: [(7, 0)])
    tokens = keras.Input((16, 8))
    for _ in range(2):
        layer = keras.layers.MultiHeadAttention(2, 12, dtype="mixed_float16")
        use_flash_attention(keras.Model(tokens, layer(tokens, tokens)))
    (record,) = caplog.records
    assert "a GPU older than Ampere" in record.message


def test_why_no_layer_changes_is_said_once(caplog, cudnn):
    forget_warnings()
    inputs = keras.Input((8,))
    dense = keras.Model(inputs, keras.layers.Dense(2)(inputs), name="dense")
    flash = attention_net()
    assert [use_flash_attention(model) for model in (dense, dense, flash, flash, flash)] == [0, 0, 2, 0, 0]
    none, already = [record.message for record in caplog.records]
    assert "attention by keras.ops in 'dense'. Found none; nothing changed." in none
    assert "Found that all have it; nothing changed." in already


def test_where_it_can_nothing_is_said(caplog, cudnn):
    forget_warnings()
    assert use_flash_attention(attention_net()) == 2
    assert not caplog.records
