"""cuDNN's attention itself: what only a GPU can show."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import LENGTH, attend, attention_net, draw, fixed, forms, largest_error, with_gradients

from tfopt.kernels import dot_product_attention, explain, use_flash_attention
from tfopt.kernels.cudnn.calls import flash_attention

pytestmark = pytest.mark.gpu

# Over the largest entry: each result is rounded once, and the gradients start from a rounded output.
LIMITS = {"bfloat16": 2e-2, "float16": 3e-3}
CASES = [
    # dtype, query length, key length, heads, size, causal
    ("bfloat16", 256, 256, 4, 64, True),
    ("bfloat16", 256, 256, 4, 64, False),
    ("float16", 256, 256, 4, 64, True),
    ("bfloat16", 128, 128, 2, 32, True),
    ("bfloat16", 512, 512, 2, 128, True),
    ("bfloat16", 2048, 2048, 1, 64, True),
    ("bfloat16", 333, 333, 2, 64, True),
    ("bfloat16", 256, 512, 4, 64, False),
    ("float16", 333, 333, 2, 64, False),
    ("bfloat16", 64, 64, 2, 8, True),  # the shortest sequence and the smallest head that tfopt hands over
]


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case):
    dtype, query_length, key_length, heads, size, causal = case
    lengths = (query_length, key_length, key_length)
    tensors = [draw(2, length, heads, size, dtype=dtype, seed=seed) for seed, length in enumerate(lengths)]
    options = {"causal": causal, "scale": size**-0.5}
    exact = with_gradients(attend, *tensors, **options)
    flash = with_gradients(flash_attention, *tensors, jit_compile=True, **options)
    assert largest_error(flash, exact) < LIMITS[dtype]

    def plain(query, key, value, *, causal, scale):
        return keras.ops.dot_product_attention(query, key, value, is_causal=causal, scale=scale)

    error = np.mean([np.abs(one - other).mean() for one, other in zip(flash, exact, strict=True)])
    keras_own = with_gradients(plain, *tensors, jit_compile=True, **options)
    assert error <= 1.05 * np.mean([np.abs(one - other).mean() for one, other in zip(keras_own, exact, strict=True)])


FORMS = forms(length=256)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(form, dtype):
    key_heads, bias, options = FORMS[form]
    tensors = [draw(2, 256, heads, 64, dtype=dtype, seed=seed) for seed, heads in enumerate((4, key_heads, key_heads))]
    given = tensors if bias is None else [*tensors, tf.cast(bias, dtype)]

    def flash(query, key, value, bias=None, **options):
        return flash_attention(query, key, value, bias=bias, scale=0.125, **options)

    found = with_gradients(flash, *given, jit_compile=True, **options)
    expected = with_gradients(attend, *given, scale=0.125, **options)
    if bias is not None and bias.shape[1] == 1:  # a constant
        found, expected = found[:4], expected[:4]
    assert largest_error(found, expected) < LIMITS[dtype]


def test_a_function_takes_it_under_xla_alone():
    query = draw(2, 128, 4, 64, dtype="bfloat16")

    def operations(**options):
        function = tf.function(lambda query: dot_product_attention(query, query, query, causal=True), **options)
        return {operation.type for operation in function.get_concrete_function(query).graph.get_operations()}

    assert "XlaCallModule" in operations(jit_compile=True)
    assert "XlaCallModule" not in operations()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_model_trains_as_without_it(policy):
    losses = {}
    for name in ("plain", "flash"):
        model = attention_net(policy)
        if name == "flash":
            assert use_flash_attention(model) == 2
        losses[name] = model.fit(fixed(8, 10), epochs=3, shuffle=False, verbose=0).history["loss"]
    assert [row.training for row in explain(model).layers] == [(), ()]
    np.testing.assert_allclose(losses["flash"], losses["plain"], rtol=0.01)


def test_memory_stays_linear_in_the_sequence():
    length = 64 * LENGTH
    tensors = [draw(1, length, 2, 64, dtype="bfloat16", seed=seed) for seed in range(3)]
    tf.config.experimental.reset_memory_stats("GPU:0")
    before = tf.config.experimental.get_memory_info("GPU:0")["current"]
    with_gradients(flash_attention, *tensors, jit_compile=True, causal=True, scale=0.125)
    used = tf.config.experimental.get_memory_info("GPU:0")["peak"] - before
    assert used < 2 * length * length * 2  # what the scores alone would take in bfloat16
