"""The pieces themselves: against sums in float64, and what XLA keeps in memory."""

import json
import os
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import rounding
from quick import first_quick

from tfopt.errors import UnsupportedError
from tfopt.kernels import token_pieces
from tfopt.kernels.token_pieces import LastProduct, in_pieces, piece_rows

pytestmark = pytest.mark.usefixtures("exact_products")
TOKENS, WIDTH, CLASSES = 37, 8, 60
MIB = 2**20


def cross_entropy(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, tf.cast(logits, "float32"), from_logits=True)


def drawn(scale, weights=None):
    """Hidden states, kernel, bias, labels and weights, with logits up to about 6 · `scale`."""
    random = np.random.default_rng(0)
    hidden, kernel = random.normal(size=(TOKENS, WIDTH)), random.normal(size=(WIDTH, CLASSES)) * scale / WIDTH**0.5
    bias, labels = random.normal(size=CLASSES) * scale, random.integers(CLASSES, size=TOKENS)
    return hidden, kernel, bias, labels, random.uniform(-1, 1, size=TOKENS) if weights is None else weights


def truth(hidden, kernel, bias, labels, weights):
    """Losses and gradients by their formulas, in float64."""
    logits = hidden @ kernel + bias
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probability = shifted / shifted.sum(1, keepdims=True)
    losses = np.log(shifted.sum(1)) + logits.max(1) - logits[np.arange(len(labels)), labels]
    slope = (probability - np.eye(kernel.shape[1])[labels]) * weights[:, None]
    return losses, slope @ kernel.T, hidden.T @ slope, slope.sum(0)


def computed(arrays, dtype="float32", *, chunks=4, transposed=False, jit_compile=False, upstream=1.0):
    hidden, kernel, bias, labels, weights = arrays
    kernel = kernel.T if transposed else kernel

    @tf.function(jit_compile=jit_compile, autograph=False)
    def run(hidden, kernel, bias, labels, weights):
        with tf.GradientTape() as tape:
            tape.watch([hidden, kernel, bias])
            last = LastProduct(
                kernel=kernel, transposed=transposed, bias=bias, soft_cap=None, dtypes=(tf.as_dtype(dtype), tf.float32)
            )
            zero, (losses,) = in_pieces(hidden, last, labels, [cross_entropy], weights, chunks=chunks, wide=tf.float32)
            target = zero * upstream
        return zero, losses, *tape.gradient(target, [hidden, kernel, bias])

    floats = [tf.constant(array, "float32") for array in (kernel, bias)]
    zero, losses, of_hidden, of_kernel, of_bias = run(
        tf.constant(hidden, dtype), *floats, tf.constant(labels), tf.constant(weights, "float32")
    )
    assert zero == 0
    assert of_hidden.dtype == dtype
    assert of_kernel.dtype == of_bias.dtype == tf.float32
    of_kernel = tf.transpose(of_kernel) if transposed else of_kernel
    return [tf.cast(x, "float64").numpy() for x in (losses, of_hidden, of_kernel, of_bias)]


def error(found, exact):
    """The largest difference, as a share of the largest number of its array."""
    pairs = zip(found, exact, strict=True)
    return max(np.abs(one - other).max() / np.abs(other).max() for one, other in pairs)


@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1000.0])
def test_losses_and_gradients_are_those_of_float64(jit_compile, transposed, scale):
    arrays = drawn(scale)
    found = computed(arrays, transposed=transposed, jit_compile=jit_compile)
    # A logit's rounding grows with the logit, and is the error of a probability.
    assert error(found, truth(*arrays)) <= 4 * rounding("float32", WIDTH) * max(1, 6 * scale if scale > 1 else 1)


@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_in_16_bits_are_summed_in_float32(jit_compile, dtype):
    arrays = drawn(1.0)
    found = computed(arrays, dtype, jit_compile=jit_compile)
    assert error(found, truth(*arrays)) <= 4 * rounding(dtype, WIDTH)


def test_weights_too_small_for_float16_and_a_loss_scale_leave_the_gradients():
    arrays = drawn(1.0, np.full(TOKENS, 2.0**-22))  # a mean over four million tokens
    found = computed(arrays, "float16", upstream=2.0**20)
    exact = truth(*arrays)
    scaled = [exact[0], *(2.0**20 * gradient for gradient in exact[1:])]
    assert error(found, scaled) <= 4 * rounding("float16", WIDTH)


def test_a_gradient_of_the_gradient_is_refused():
    x = tf.random.stateless_normal([TOKENS, WIDTH], [1, 2])

    @tf.function(autograph=False)
    def second(hidden):
        last = LastProduct(
            kernel=tf.ones([WIDTH, CLASSES]), transposed=False, bias=None, soft_cap=None, dtypes=(tf.float32,)
        )
        labels, weights = tf.zeros([TOKENS], "int32"), tf.ones([TOKENS])
        with tf.GradientTape() as outer:
            outer.watch(hidden)
            with tf.GradientTape() as inner:
                inner.watch(hidden)
                zero, _ = in_pieces(hidden, last, labels, [cross_entropy], weights, chunks=2, wide=tf.float32)
            slope = inner.gradient(zero, hidden)
        return outer.gradient(slope, hidden)

    with pytest.raises(UnsupportedError, match=r"Expected gradients of a loss\. Found: .*undo\(model\)"):
        second(x)


@pytest.mark.parametrize(
    ("tokens", "classes", "chunks", "rows"),
    [
        (10, 50, "auto", 10),
        (1024, 50257, "auto", 256),  # 192 MiB of logits in 4 pieces of 49
        (16384, 50304, "auto", 2048),  # 3.1 GiB in 16, not 50
        (7, 2**25, "auto", 1),
        (0, 50, "auto", 1),
        (10, 50, 3, 4),
        (10, 50, 100, 1),
        (0, 50, 3, 1),
    ],
)
def test_rows_of_a_piece(tokens, classes, chunks, rows):
    assert piece_rows(tf.constant(tokens), classes, chunks) == rows


def test_an_empty_batch_has_no_losses():
    hidden, kernel, bias, labels, _ = drawn(1.0)
    losses, *gradients = computed((hidden[:0], kernel, bias, labels[:0], np.zeros(0)))
    assert losses.shape == (0,)
    assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("transposed", [False, True])
def test_on_a_gpu_xla_sums_products_of_16_bits_in_float32(transposed, monkeypatch):
    monkeypatch.setattr(token_pieces, "in_xla", lambda: True)

    def run(hidden, kernel, labels, weights):
        last = LastProduct(
            kernel=kernel, transposed=transposed, bias=None, soft_cap=None, dtypes=(tf.bfloat16, tf.float32)
        )
        with tf.GradientTape() as tape:
            tape.watch(kernel)
            zero, _ = in_pieces(hidden, last, labels, [cross_entropy], weights, chunks=4, wide=tf.float32)
        return tape.gradient(zero, kernel)

    specs = [
        tf.TensorSpec([TOKENS, WIDTH], "bfloat16"),
        tf.TensorSpec([CLASSES, WIDTH] if transposed else [WIDTH, CLASSES]),
        tf.TensorSpec([TOKENS], "int32"),
        tf.TensorSpec([TOKENS]),
    ]
    compiled = tf.function(run, jit_compile=True, autograph=False)
    text = compiled.experimental_get_compiler_ir(*specs)(stage="hlo", platform_name="GPU")
    shape = f"{CLASSES},{WIDTH}" if transposed else f"{WIDTH},{CLASSES}"
    assert re.search(rf"= f32\[{shape}\]\S* dot\(", text), "the gradient of the kernel is rounded in each piece"
    assert f"[{TOKENS},{CLASSES}]" not in text


STEP = """
import json, sys
import keras
import numpy as np
from tfopt.bench.workloads import gpt2
from tfopt.kernels import chunk_cross_entropy

keras.utils.set_random_seed(0)
model = gpt2.model(blocks=2, width=128, heads=4, vocabulary=50257, length=512, jit_compile=True)
model.compile("sgd", model.loss, metrics=["accuracy"], jit_compile=True)
changed = chunk_cross_entropy(model) if sys.argv[1] == "pieces" else 0
tokens = np.random.default_rng(0).integers(50257, size=(2, 513)).astype("int32")
print(json.dumps([changed, float(model.train_on_batch(tokens[:, :-1], tokens[:, 1:])[0])]))
"""


def trained_under_xla(arm, folder):
    """What a GPT-2-like step printed, and the bytes and the largest value of its program."""
    environ = {**os.environ, "XLA_FLAGS": f"--xla_dump_to={folder} --xla_dump_hlo_as_text"}
    run = subprocess.run([sys.executable, "-c", STEP, arm], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    text = max((file.read_text() for file in folder.glob("*buffer-assignment.txt")), key=len)
    sizes = [int(size) for size in re.findall(r"^allocation \d+: size (\d+)", text, re.MULTILINE)]
    values = [int(size) for size in re.findall(r"size=(\d+)", text)]
    return *json.loads(run.stdout.splitlines()[-1]), sum(sizes) / MIB, max(values) / MIB


@pytest.mark.slow
@pytest.mark.no_gpu
def test_no_buffer_of_a_step_has_the_size_of_the_logits(tmp_path):
    logits = 2 * 512 * 50257 * 4 / MIB
    arms = {arm: trained_under_xla(arm, tmp_path / arm) for arm in ("plain", "pieces")}
    assert [changed for changed, *_ in arms.values()] == [0, 1]
    losses = [loss for _, loss, *_ in arms.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert arms["plain"][3] >= logits
    assert arms["pieces"][3] <= logits / 4 * 1.01
    assert arms["pieces"][2] < arms["plain"][2] - logits
