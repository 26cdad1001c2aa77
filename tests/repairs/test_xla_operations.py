"""Operations that XLA gets wrong, found without running them, and what each computes on stock TensorFlow."""

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.repairs.xla_operations import XLA_OPERATIONS, wrong_under_xla

ROWS = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")
KEPT = ROWS[ROWS[:, 0] > 0]


def kept(x):
    return tf.boolean_mask(x, x[:, 0] > 0)


def images(x):
    return tf.reshape(x, [1, -1, 1, 1])


def flat(x):
    return tf.reshape(kept(x), [-1])


def gradient(expression):
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(expression(x) ** 2)
        return tf.convert_to_tensor(tape.gradient(total, x))

    return step


# Operation → expression, and what NumPy says.
WRONG = {
    "OnesLike": (lambda x: tf.reduce_sum(tf.ones_like(kept(x))), lambda: KEPT.size),
    "Roll": (lambda x: tf.reduce_sum(tf.roll(kept(x), 1, 0)[:2], 0), lambda: KEPT[-1] + KEPT[0]),
    "ReverseSequence": (
        lambda x: tf.reduce_sum(tf.reverse_sequence(flat(x)[None], [2], seq_axis=1)),
        lambda: KEPT.sum(),
    ),
    "ResizeNearestNeighbor": (
        lambda x: tf.image.resize(images(flat(x)), [2, 1], "nearest")[0, :, 0, 0],
        lambda: KEPT.ravel()[[7, 22]],
    ),
    "ResizeBilinear": (lambda x: tf.image.resize(images(flat(x)), [2, 1])[0, :, 0, 0], lambda: KEPT.ravel()[[7, 22]]),
    "MirrorPad": (
        lambda x: tf.reduce_sum(tf.pad(kept(x), [[1, 1], [0, 0]], "REFLECT"), 0),
        lambda: KEPT.sum(0) + KEPT[1] + KEPT[-2],
    ),
    "ConcatOffset": (  # the sum of 2 x² + (x + 1)²
        gradient(lambda x: tf.concat([kept(x), kept(x) + 1, kept(x)], 0)),
        lambda: (6 * ROWS + 2) * (ROWS[:, :1] > 0),
    ),
    "BatchToSpaceND": (
        gradient(lambda x: tf.space_to_batch(tf.reshape(kept(x), [-1, 1, 2, 1]), [1, 2], [[0, 0], [0, 0]])),
        lambda: 2 * ROWS * (ROWS[:, :1] > 0),
    ),
    "MatrixDiagV3": (lambda x: tf.reduce_sum(tf.linalg.diag(flat(x)) + 1), lambda: KEPT.sum() + KEPT.size**2),
    "MatrixDiagPartV3": (
        lambda x: tf.reduce_sum(tf.linalg.diag_part(tf.matmul(kept(x), kept(x), transpose_b=True))),
        lambda: (KEPT**2).sum(),
    ),
    "AvgPool": (
        lambda x: tf.reduce_sum(tf.nn.avg_pool1d(tf.reshape(kept(x), [1, -1, 1]), 2, 1, "SAME")),
        lambda: (KEPT.ravel()[:-1] + KEPT.ravel()[1:]).sum() / 2 + KEPT.ravel()[-1],
    ),
    "StridedSlice": (lambda x: kept(x)[-1], lambda: KEPT[-1]),
}
CRASHES = {
    "Cumsum": lambda x: tf.cumsum(kept(x)),
    "Cumprod": lambda x: tf.math.cumprod(kept(x)),
    "CumulativeLogsumexp": lambda x: tf.math.cumulative_logsumexp(kept(x)),
    "StridedSlice": lambda x: kept(x)[-2:],
}
RIGHT = {
    "a fixed size": lambda x: tf.ones_like(x) + tf.cumsum(tf.roll(x, 1, 0)) + x[-1] + x[-2:][0],
    "ones of a shape": lambda x: tf.ones(tf.shape(kept(x))),
    "keras.ops.zeros_like": lambda x: keras.ops.zeros_like(kept(x)) + 1,
    "a slice from the front": lambda x: tf.gather(kept(x), tf.shape(kept(x))[0] - 1),
    "a negative end": lambda x: kept(x)[:-1],
    "a negative index of a fixed axis": lambda x: kept(x)[:, -1],
    "a cumulative sum of a mask": lambda x: tf.cumsum(tf.where(x > 0, x, 0.0)),
    "the gradient of a concatenation along a fixed axis": gradient(lambda x: tf.concat([kept(x), kept(x) + 1], 1)),
    "the gradient of a concatenation of fixed sizes": gradient(lambda x: tf.concat([x, x + 1], 0)),
    "a mean of a mask": lambda x: tf.reduce_mean(kept(x)),
    "a sorted mask": lambda x: tf.sort(kept(x), 0),
}


def found(expression):
    graph = tf.function(expression, autograph=False).get_concrete_function(tf.constant(ROWS)).graph
    return {operation.type for operation in graph.get_operations() if wrong_under_xla(operation)}


@pytest.mark.parametrize("operation", [*WRONG, *CRASHES])
def test_what_xla_gets_wrong_is_found_without_running_it(operation):
    for expression in (WRONG.get(operation, [None])[0], CRASHES.get(operation)):
        assert expression is None or operation in found(expression)


@pytest.mark.parametrize("operation", first_quick(WRONG))
def test_stock_xla_gets_it_wrong(operation):
    expression, expected = WRONG[operation]
    stock = {on: tf.function(expression, autograph=False, jit_compile=on)(ROWS).numpy() for on in (False, True)}
    np.testing.assert_allclose(stock[False], expected(), rtol=1e-4, atol=1e-4)
    assert not np.allclose(stock[True], expected(), rtol=1e-2, atol=1e-2)  # else XLA was mended: take it off the list


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["Cumsum", "StridedSlice"])
def test_stock_xla_ends_the_process(operation):
    code = (
        f"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "import tensorflow as tf, test_xla_operations as cases\n"
        f"tf.function(cases.CRASHES[{operation!r}], autograph=False, jit_compile=True)(tf.constant(cases.ROWS))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode < 0, done.stderr[-2000:]


def test_what_xla_computes_right_is_left_alone():
    assert not any(found(expression) for expression in RIGHT.values())


@pytest.mark.parametrize("name", first_quick(RIGHT))
def test_stock_xla_computes_it_right(name):
    off, on = (tf.function(RIGHT[name], autograph=False, jit_compile=jit)(ROWS).numpy() for jit in (False, True))
    np.testing.assert_allclose(off, on, rtol=1e-4, atol=1e-5)


def test_each_has_a_remedy():
    for wrong in XLA_OPERATIONS.values():
        assert "leave XLA off" in wrong.remedy
