"""The emitted modules computed on a CPU, with TensorFlow in cuDNN's place: operands, results, gradients."""

import pytest
import tensorflow as tf
from plain_attention import attend, draw, forms, largest_error, rounding, with_gradients
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.kernels.cudnn.calls import flash_attention

# Rounding of the results alone: the fake computes in float64, from operands of this type.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11}
SHAPES = [
    # batch, query length, key length, heads, size, dtype, causal
    (2, 64, 64, 2, 8, "bfloat16", True),
    (2, 64, 64, 2, 8, "float16", False),
    (1, 65, 65, 3, 32, "float16", True),
    (2, 64, 80, 1, 128, "bfloat16", False),
]


def operands(batch, query_length, key_length, heads, size, dtype):
    lengths = (query_length, key_length, key_length)
    return [draw(batch, length, heads, size, dtype=dtype, seed=seed) for seed, length in enumerate(lengths)]


@pytest.mark.slow
@pytest.mark.parametrize("shape", first_quick((shape,) for shape in SHAPES))
def test_output_and_gradients(cudnn, shape):
    *sizes, dtype, causal = shape
    tensors = operands(*sizes, dtype)
    found = with_gradients(flash_attention, *tensors, jit_compile=True, causal=causal, scale=0.3)
    expected = with_gradients(attend, *tensors, causal=causal, scale=0.3)
    assert cudnn.targets == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    # The backward pass starts from an output that was rounded once.
    assert largest_error(found, expected) < 3 * ROUNDING[dtype]


FORMS = forms()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_forms(cudnn, form):
    key_heads, bias, options = FORMS[form]
    query, *_ = operands(2, 64, 64, 4, 8, "bfloat16")
    _, *others = operands(2, 64, 64, key_heads, 8, "bfloat16")
    given = [query, *others] if bias is None else [query, *others, tf.cast(bias, "bfloat16")]

    def flash(query, key, value, bias=None, **options):
        return flash_attention(query, key, value, bias=bias, scale=0.3, **options)

    found = with_gradients(flash, *given, jit_compile=True, **options)
    expected = with_gradients(attend, *given, scale=0.3, **options)
    if bias is not None and bias.shape[1] == 1:  # a constant
        assert not found.pop().any()
        expected.pop()
    assert largest_error(found, expected) < 3 * ROUNDING["bfloat16"]


@pytest.mark.slow
def test_gradients_reach_what_comes_before(cudnn):
    weight = tf.Variable(draw(8, 8, dtype="bfloat16"))
    inputs = operands(2, 64, 64, 2, 8, "bfloat16")[0]

    def loss(function):
        with tf.GradientTape() as tape:
            query = inputs @ weight
            total = tf.reduce_sum(tf.square(function(query, query, query)))
        return tape.gradient(total, weight)

    flash = tf.function(lambda: loss(lambda *qkv: flash_attention(*qkv, causal=True, scale=0.3)), jit_compile=True)()
    plain = loss(lambda *qkv: attend(*qkv, causal=True, scale=0.3))
    limit = rounding("bfloat16", 2 * 64 * 2)  # the weight's gradient adds up every position and head
    assert largest_error([tf.cast(flash, tf.float64).numpy()], [tf.cast(plain, tf.float64).numpy()]) < limit


def test_gradient_checkpointing_runs_the_forward_call_twice(cudnn):
    tensors = operands(2, 64, 64, 2, 8, "bfloat16")

    def attention(*operands):
        return tf.recompute_grad(lambda *qkv: flash_attention(*qkv, causal=True, scale=0.3))(*operands)

    found = with_gradients(attention, *tensors, jit_compile=True)
    assert cudnn.targets.count("__cudnn$fmhaSoftmax") == 2
    expected = with_gradients(attend, *tensors, causal=True, scale=0.3)
    assert largest_error(found, expected) < 3 * ROUNDING["bfloat16"]


def test_without_cudnn_it_fails_loudly():
    tensors = operands(2, 64, 64, 2, 8, "bfloat16")
    with (
        tf.device("CPU:0"),
        pytest.raises(tf.errors.NotFoundError, match=r"custom call to __cudnn\$fmhaSoftmax for Host"),
    ):
        tf.function(flash_attention, jit_compile=True)(*tensors, causal=True, scale=0.3)


def test_a_gradient_of_the_gradient_is_refused(cudnn):
    tensors = operands(1, 64, 64, 1, 8, "bfloat16")

    @tf.function(jit_compile=True, autograph=False)
    def curvature(query, key, value):
        with tf.GradientTape() as outer:
            outer.watch(query)
            with tf.GradientTape() as inner:
                inner.watch(query)
                output = flash_attention(query, key, value, causal=True, scale=0.3)
            slope = inner.gradient(output, query)
        return outer.gradient(slope, query)

    with pytest.raises(UnsupportedError, match="a gradient of cuDNN attention's gradient"):
        curvature(*tensors)
