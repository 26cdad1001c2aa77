"""KerasHub's language models through cuDNN's forms of attention, which TensorFlow computes on a CPU."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hub_models import LANGUAGE_MODELS, backbone, batch
from quick import campaign, first_quick

from tfopt.kernels import explain, undo, use_flash_attention

PADDED = ("nowhere", "right", "left")
GROUPED = ("Llama", "Llama3", "Mistral", "Gemma", "Gemma3", "Qwen", "Qwen3", "Phi3")
WINDOWS = {"Mistral": {16}}


def outputs_and_gradients(model, tokens, **options):
    """All as one vector each, in float64."""

    def step(tokens):
        with tf.GradientTape() as tape:
            output = tf.concat([tf.reshape(tf.cast(each, tf.float32), [-1]) for each in outputs_of(model, tokens)], 0)
            loss = tf.reduce_sum(output * np.random.default_rng(2).normal(size=output.shape).astype("float32"))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return output, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

    output, gradients = tf.function(step, autograph=False, **options)(tokens)
    return output.numpy().astype(np.float64), np.concatenate([np.ravel(each) for each in gradients]).astype(np.float64)


def outputs_of(model, tokens):
    """Where there is a token: what comes out elsewhere is no one's concern."""
    present = next((value for name, value in tokens.items() if "padding_mask" in name), None)
    for output in keras.tree.flatten(model(tokens, training=True)):
        known = present is None or output.shape.rank != 3
        yield output if known else output * tf.cast(present[..., None], output.dtype)


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def assert_taken_and_the_same(name, policy, after=lambda: None, **options):
    """All attention is taken, and is as near to float32 as the layers' own path is, forward and backward."""
    pytest.importorskip("keras_hub")
    if (name, policy) == ("T5Backbone", "mixed_float16"):
        pytest.skip("KerasHub's T5 masks with -1e9, which float16 cannot hold: its own output is NaN")
    model, exact = backbone(name, policy), backbone(name, "float32")
    exact.set_weights(model.get_weights())
    tokens = {padded: batch(model, padded) for padded in PADDED}
    plain = {padded: outputs_and_gradients(model, given, **options) for padded, given in tokens.items()}
    changed = use_flash_attention(model)
    assert changed >= 2
    for padded, given in tokens.items():
        output, gradients = outputs_and_gradients(model, given, **options)
        (own_output, own_gradients), (true_output, true_gradients) = plain[padded], outputs_and_gradients(exact, given)
        assert distance(output, true_output) < 1.25 * distance(own_output, true_output) < 0.02
        # One unit that is rounded to the other side of 0 changes what all layers before it get.
        rounding = distance(own_gradients, true_gradients)
        assert distance(gradients, true_gradients) < max(0.03, 3 * rounding)
        assert rounding < 0.05
        assert [row.training for row in explain(model).layers] == [()] * changed
        after()
    assert undo(model) == changed


NAMES = sorted(LANGUAGE_MODELS, key=lambda name: name != "LlamaBackbone")
CASES = [
    *first_quick([(name, "mixed_bfloat16") for name in NAMES], 1, every=2),
    *campaign([(name, "mixed_float16") for name in NAMES]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # of layers that KerasHub does not build
def test_all_attention_is_taken_and_computes_the_same(cudnn, uncompiled, name, policy):
    kind = name.removesuffix("Backbone")

    def in_the_expected_form():
        assert {config["sliding_window_length"] for _, config in cudnn.calls} - {0} == WINDOWS.get(kind, set())
        assert all(shapes["key"][2] == (2 if kind in GROUPED else 4) for shapes in cudnn.shapes)
        cudnn.calls.clear()
        cudnn.shapes.clear()

    assert_taken_and_the_same(name, policy, in_the_expected_form)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LANGUAGE_MODELS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_attention_is_taken_on_a_gpu(exact_products, name):
    assert_taken_and_the_same(name, "mixed_bfloat16", jit_compile=True)
