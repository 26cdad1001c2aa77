"""Layers as people write them: what they do to the scores reaches cuDNN, or they keep their own path."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from plain_attention import LENGTH, draw
from quick import first_quick

from tfopt.kernels import explain, undo, use_flash_attention

ops = keras.ops
HEADS, SIZE = 2, 8
LOWER = np.tri(LENGTH, dtype=bool)
DISTANCE = -np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)).astype("float32")
NEAR = ops.cast(0.1 * DISTANCE, "bfloat16")
OUTSIDE = ops.cast(np.where(LOWER, 0.0, -np.inf), "bfloat16")


class Own(keras.layers.Layer):
    """Attention whose scores a function changes, given the padding of the batch and a table of weights."""

    def __init__(self, change, table=(), **options):
        super().__init__(dtype="bfloat16", **options)
        self.change = change
        self.table = self.add_weight(shape=table, initializer=keras.initializers.RandomNormal(seed=2), name="table")
        self.project = keras.layers.Dense(3 * HEADS * SIZE, dtype="bfloat16")

    def call(self, inputs, present=None):
        shape = ops.shape(inputs)
        projected = ops.reshape(self.project(inputs), (shape[0], shape[1], 3, HEADS, SIZE))
        query, key, value = (projected[:, :, part] for part in range(3))
        scores = ops.einsum("bqhd,bkhd->bhqk", query, key) * SIZE**-0.5
        weights = ops.softmax(self.change(scores, present, self.table))
        return ops.einsum("bhqk,bkhd->bqhd", weights, value)


class Net(keras.Model):
    """One layer as a model."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs, present=None):
        return self.layer(inputs, present=present)


def keys(mask):
    return mask[:, None, None, :]


def number(mask):
    return ops.cast(keys(mask), "bfloat16")


CHANGES = {
    # the change of the scores, the shape of the table, and what keeps the layer from cuDNN
    "ours, inverted": (lambda scores, mask, _: ops.where(~keys(mask), -1e9, scores), (), ()),
    "a constant that is alike for all heads": (lambda scores, mask, _: scores + NEAR, (), ()),
    "a trained bias that is alike for all heads": (lambda scores, mask, table: scores + table, (LENGTH, LENGTH), ()),
    "two constants": (lambda scores, mask, _: scores + NEAR + number(mask) * 3, (), ()),
    "ones are masked": (lambda scores, mask, _: scores + (1 - number(mask)) * -1e9, (), ()),
    "ones are masked, not by much": (lambda scores, mask, _: scores + (1 - number(mask)) * -2.0, (), ()),
    "subtracted": (lambda scores, mask, _: scores - (1 - number(mask)) * 1e9, (), ()),
    "subtracted, not by much": (lambda scores, mask, _: scores - (1 - number(mask)) * 2, (), ()),
    "trained, and masked": (
        lambda scores, mask, table: scores + table + (1 - number(mask)) * -1e9,
        (LENGTH, LENGTH),
        (),
    ),
    "trained for each head": (lambda scores, mask, table: scores + table, (HEADS, LENGTH, LENGTH), ()),
    "two trained": (
        lambda scores, mask, table: scores + table + ops.transpose(table, (0, 2, 1)),
        (HEADS, LENGTH, LENGTH),
        (),
    ),
    "trained slopes": (lambda scores, mask, table: scores + table * ops.cast(DISTANCE, "bfloat16"), (HEADS, 1, 1), ()),
    "trained for each query": (
        lambda scores, mask, table: scores + table + ops.cast(ops.where(LOWER & keys(mask), 0.0, -1e9), "bfloat16"),
        (HEADS, LENGTH, 1),
        ("a bias and a mask that differs by query",),
    ),
    "causal, and constants": (lambda scores, mask, _: ops.where(LOWER, scores + NEAR, -1e9), (), ()),
    "infinity": (lambda scores, mask, _: ops.where(LOWER, scores, -np.inf), (), ()),
    "infinity, added": (lambda scores, mask, _: scores + OUTSIDE, (), ()),
    "a trained scale": (lambda scores, mask, table: scores * table, (), ("Mul on the scores",)),
    "of the scores themselves": (
        lambda scores, mask, _: scores + 0.5 * scores,
        (),
        ("a bias of its own for each example",),
    ),
    "a bias of the scores": (
        lambda scores, mask, _: scores + ops.mean(scores, -1, keepdims=True),
        (),
        ("a bias of its own for each example",),
    ),
    "scores the other way round": (lambda scores, mask, _: 3.0 - scores, (), ("Sub on the scores",)),
    "masked by a product": (lambda scores, mask, _: scores * number(mask), (), ("Mul on the scores",)),
    "clipped": (lambda scores, mask, _: ops.clip(scores, -1, 1), (), ("Maximum on the scores",)),
    "left padding, reversed": (lambda scores, mask, _: ops.where(keys(mask[:, ::-1]), scores, -1e9), (), ()),
    "one length for all": (
        lambda scores, mask, _: ops.where(ops.arange(LENGTH)[None] < ops.sum(mask[1:2], keepdims=True), scores, -1e9),
        (),
        (),
    ),
    "nothing is allowed": (lambda scores, mask, _: ops.where(LOWER & False, scores, -1e9), (), ()),
    "soft, above a tenth": (
        lambda scores, mask, _: ops.where(ops.exp(NEAR) * number(mask) > 0.1, scores, -1e9),
        (),
        (),
    ),
    "negative numbers are true": (
        lambda scores, mask, _: ops.where(ops.cast(ops.cast(keys(mask), "int32") - 1, "bool"), scores, -1e9),
        (),
        (),
    ),
    "through a shape": (lambda scores, mask, _: ops.where(tf.ensure_shape(LOWER, (LENGTH,) * 2), scores, -1e9), (), ()),
    "-100, as in Swin": (lambda scores, mask, _: scores + ops.cast(ops.where(LOWER, 0.0, -100.0), "bfloat16"), (), ()),
    "masked, and scaled down": (
        lambda scores, mask, _: ops.where(keys(mask), scores, -3e4) / 1e4,
        (),
        ("masked scores that are scaled",),
    ),
    "far away, in float32": (
        lambda scores, mask, _: ops.cast(scores, "float32") + 7.3 * np.arange(LENGTH, dtype="float32"),
        (),
        ("a float32 bias that bfloat16 does not hold",),
    ),
    "near, in float32": (lambda scores, mask, _: ops.cast(scores, "float32") + 0.1 * DISTANCE, (), ()),
    "scores of more axes": (
        lambda scores, mask, _: (scores[None] + ops.zeros((1,) * 5, "bfloat16"))[0],
        (),
        ("StridedSlice on the scores",),
    ),
    "a mask for each head": (
        lambda scores, mask, _: ops.where(keys(mask) | (np.arange(HEADS) == 0)[:, None, None], scores, -1e9),
        (),
        ("a mask of its own for each head",),
    ),
}


def run(model, inputs, mask):
    """The output, and the gradients of the weights and the inputs, in float64."""

    @tf.function(autograph=False)
    def step(inputs, mask):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = tf.cast(model(inputs, present=mask), tf.float32)
            loss = tf.reduce_sum(output * draw(*output.shape, seed=7))
        sources = [inputs, *(variable.value for variable in model.trainable_variables)]
        return output, tape.gradient(loss, sources, unconnected_gradients="zero")

    output, gradients = step(inputs, mask)
    return [tf.cast(each, tf.float64).numpy() for each in (output, *gradients)]


@pytest.mark.slow
@pytest.mark.parametrize("case", first_quick(CHANGES, 8))
def test_what_is_done_to_the_scores(cudnn, uncompiled, case):
    change, table, reasons = CHANGES[case]
    keras.utils.set_random_seed(1)
    layer = Own(change, table)
    model = Net(layer)
    mask = tf.sequence_mask([64, 30, 1], LENGTH)
    inputs = draw(3, LENGTH, 16)
    own = run(model, inputs, mask)
    assert use_flash_attention(model) == 1
    found = run(model, inputs, mask)
    assert [row.inference for row in explain(model).layers] == [reasons]
    for one, other in zip(found, own, strict=True):
        assert np.linalg.norm(one - other) <= (0.04 * np.linalg.norm(other) if not reasons else 0)
    assert undo(model) == 1


class Pooling(keras.layers.Layer):
    """One query for each example: no axis of heads, and none of queries."""

    def call(self, inputs):
        weights = ops.softmax(ops.einsum("bd,btd->bt", inputs[:, 0], inputs))
        return ops.einsum("bt,btd->bd", weights, inputs)


class Broadcast(keras.layers.Layer):
    """Scores that get an axis from a bias."""

    def call(self, inputs):
        scores = ops.einsum("bqd,bkd->bqk", inputs, inputs) + ops.zeros((2, 1, LENGTH, LENGTH), inputs.dtype)
        return ops.einsum("hbqk,bkd->hbqd", ops.softmax(scores), inputs)


class Afterwards(keras.layers.Layer):
    """Weights that are masked after the softmax."""

    def call(self, inputs):
        scores = ops.einsum("bqhd,bkhd->bhqk", inputs, inputs)
        return ops.einsum("bhqk,bkhd->bqhd", ops.where(LOWER, ops.softmax(scores), 0.0), inputs)


class Wide(keras.layers.Layer):
    """The weights stay in float32."""

    def call(self, inputs):
        scores = ops.einsum("bqhd,bkhd->bhqk", inputs, inputs)
        return ops.einsum("bhqk,bkhd->bqhd", ops.softmax(ops.cast(scores, "float32")), inputs)


class Grouped(keras.layers.Layer):
    """Five axes, with a bias for each group."""

    def call(self, inputs):
        query = ops.reshape(inputs, (3, LENGTH, 2, 2, SIZE))
        key = inputs[:, :, :2]
        scores = ops.einsum("bqkgd,bskd->bkgqs", query, key)
        bias = ops.reshape(ops.arange(2, dtype=inputs.dtype), (2, 1, 1, 1)) * NEAR
        return ops.einsum("bkgqs,bskd->bqkgd", ops.softmax(scores + bias), key)


class Positional(keras.layers.Layer):
    """Keras' operation with all its arguments by position."""

    def call(self, inputs):
        return ops.dot_product_attention(inputs, inputs, inputs, NEAR[None, None], LOWER, 0.1, False, None, None)


class Counting(keras.layers.Layer):
    """A method that counts its calls."""

    def call(self, inputs):
        global CALLS
        CALLS += 1
        return ops.dot_product_attention(inputs, inputs, inputs)


CALLS = 0
LAYERS = {
    Pooling: ((LENGTH, 16), ("scores without a batch, queries and keys",)),
    Broadcast: ((LENGTH, 16), ("scores that are broadcast",)),
    Afterwards: ((LENGTH, HEADS, SIZE), ("SelectV2 on the attention weights",)),
    Wide: ((LENGTH, HEADS, SIZE), ()),
    Grouped: ((LENGTH, 4, SIZE), ()),
    Positional: ((LENGTH, HEADS, SIZE), ()),
    Counting: ((LENGTH, HEADS, SIZE), None),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_other_forms(cudnn, uncompiled, kind):
    shape, reasons = LAYERS[kind]
    layer = kind(dtype="bfloat16")
    model = keras.Sequential([keras.Input(shape, batch_size=3, dtype="bfloat16"), layer])
    inputs = draw(3, *shape, dtype="bfloat16")
    step = tf.function(lambda inputs: model(inputs), autograph=False)
    own = step(inputs)
    assert use_flash_attention(model) == (reasons is not None)
    before = CALLS
    found = tf.function(lambda inputs: model(inputs), autograph=False)(inputs)
    assert found.dtype == own.dtype
    one, other = (tf.cast(each, tf.float64).numpy() for each in (found, own))
    assert np.linalg.norm(one - other) <= (0 if reasons else 0.02 * np.linalg.norm(other))
    if reasons is None:
        assert before + 1 == CALLS
    else:
        assert [row.inference for row in explain(model).layers] == [reasons]


def test_a_vectorized_map_keeps_its_own_path(cudnn, uncompiled):
    class Mapped(keras.layers.Layer):
        def call(self, inputs):
            return ops.vectorized_map(lambda x: ops.dot_product_attention(x[None], x[None], x[None])[0], inputs)

    model = keras.Sequential([keras.Input((LENGTH, HEADS, SIZE), batch_size=3), Mapped(dtype="bfloat16")])
    inputs = draw(3, LENGTH, HEADS, SIZE, dtype="bfloat16")
    use_flash_attention(model)

    @tf.function(autograph=False)
    def step(inputs):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = model(inputs)
        return tape.gradient(output, inputs)

    assert np.isfinite(tf.cast(step(inputs), tf.float32)).all()
    assert not cudnn.calls
