"""A training step of GPT-2 lowered for a GPU, on a machine without one: it calls cuDNN's attention."""

import keras
import pytest
import tensorflow as tf

from tfopt.bench.workloads import gpt2
from tfopt.kernels import use_flash_attention
from tfopt.kernels.attention import call
from tfopt.kernels.cudnn import support

BLOCKS = 2
SIZES = {"blocks": BLOCKS, "width": 64, "heads": 2, "vocabulary": 128, "length": 128}


@pytest.fixture
def hopper(monkeypatch):
    """A machine that looks like one with an H200; what is traced there is lowered and never run."""
    monkeypatch.setattr(support, "compute_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(support, "device_type", lambda: "GPU")
    monkeypatch.setattr(call, "defect", lambda spec: None)


def lowered_step(policy, *, flash):
    """StableHLO of a step of gradient descent. It takes the weights as tensors: variables cannot be lowered."""
    keras.config.set_dtype_policy(policy)
    net = gpt2.model(**SIZES, jit_compile=True)
    if flash:
        assert use_flash_attention(net) == BLOCKS
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(tokens, targets, *weights):
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, _ = net.stateless_call(list(weights), [], tokens, training=True)
            loss = loss_of(targets, logits)
        gradients = tape.gradient(loss, list(weights))
        return loss, [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)]

    weights = [tf.TensorSpec(weight.shape, weight.dtype) for weight in net.trainable_variables]
    tokens = tf.TensorSpec((4, SIZES["length"]), tf.int32)
    lowered = tf.function(step, jit_compile=True).experimental_get_compiler_ir(tokens, tokens, *weights)
    return lowered(stage="stablehlo", platform_name="GPU")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_each_block_calls_cudnn_forward_and_backward(hopper, policy):
    text = lowered_step(policy, flash=True)
    assert text.count("@__cudnn$fmhaSoftmax(") == BLOCKS
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == BLOCKS
    element = {"mixed_bfloat16": "bf16", "mixed_float16": "f16"}[policy]
    scores = f"tensor<4x2x128x128x{element}>"
    assert scores not in text


@pytest.mark.slow
def test_without_the_kernel_the_scores_are_there(hopper):
    text = lowered_step("mixed_bfloat16", flash=False)
    assert "__cudnn$fmha" not in text
    assert "tensor<4x2x128x128xbf16>" in text


@pytest.mark.slow
def test_the_kernel_is_not_taken_on_a_cpu():
    assert "__cudnn$fmha" not in lowered_step("mixed_bfloat16", flash=True)
