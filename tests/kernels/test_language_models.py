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


def outputs_and_gradients(model, batches, **options):
    """For each batch, the outputs and the gradients, each as one float64 vector. The step is compiled once."""

    @tf.function(autograph=False, **options)
    def step(tokens):
        with tf.GradientTape() as tape:
            output = tf.concat([tf.reshape(tf.cast(each, tf.float32), [-1]) for each in outputs_of(model, tokens)], 0)
            loss = tf.reduce_sum(output * np.random.default_rng(2).normal(size=output.shape).astype("float32"))
        gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
        return output, [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]

    def vectors(tokens):
        output, gradients = step(tokens)
        return [np.concatenate([np.ravel(each) for each in found]).astype("float64") for found in ([output], gradients)]

    return [vectors(tokens) for tokens in batches]


def outputs_of(model, tokens):
    """Where there is a token: what comes out elsewhere is no one's concern."""
    present = next((value for name, value in tokens.items() if "padding_mask" in name), None)
    for output in keras.tree.flatten(model(tokens, training=True)):
        known = present is None or output.shape.rank != 3
        yield output if known else output * tf.cast(present[..., None], output.dtype)


def distance(one, other):
    return np.linalg.norm(one - other) / np.linalg.norm(other)


def assert_taken_and_the_same(name, policy, **options):
    """All attention is taken, and is as near to float32 as the layers' own path is, forward and backward."""
    pytest.importorskip("keras_hub")
    if (name, policy) == ("T5Backbone", "mixed_float16"):
        pytest.skip("KerasHub's T5 masks with -1e9, which float16 cannot hold: its own output is NaN")
    model, exact = backbone(name, policy), backbone(name, "float32")
    exact.set_weights(model.get_weights())
    batches = [batch(model, padded) for padded in PADDED]
    own, true = outputs_and_gradients(model, batches, **options), outputs_and_gradients(exact, batches)
    changed = use_flash_attention(model)
    assert changed >= 2
    flash = outputs_and_gradients(model, batches, **options)
    for (output, gradients), (own_output, own_gradients), (true_output, true_gradients) in zip(
        flash, own, true, strict=True
    ):
        assert distance(output, true_output) < 1.25 * distance(own_output, true_output) < 0.02
        # One unit that is rounded to the other side of 0 changes what all layers before it get.
        rounding = distance(own_gradients, true_gradients)
        assert distance(gradients, true_gradients) < max(0.03, 3 * rounding)
        assert rounding < 0.05
    assert [row.training for row in explain(model).layers] == [()] * changed
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
    assert_taken_and_the_same(name, policy)
    assert {config["sliding_window_length"] for _, config in cudnn.calls} - {0} == WINDOWS.get(kind, set())
    assert all(shapes["key"][2] == (2 if kind in GROUPED else 4) for shapes in cudnn.shapes)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(LANGUAGE_MODELS))
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_all_attention_is_taken_on_a_gpu(exact_products, name):
    assert_taken_and_the_same(name, "mixed_bfloat16", jit_compile=True)
