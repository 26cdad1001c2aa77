"""Attention written out in float64, and small models that attend."""

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

LENGTH = 64


def draw(*shape, dtype="float32", seed=0):
    return tf.cast(np.random.default_rng(seed).normal(size=shape), dtype)


def attend(query, key, value, bias=None, *, mask=None, causal=False, window=0, lengths=None, scale=None):
    """Softmax of the scores times the value, nothing fused."""
    query, key, value = (tf.cast(tensor, tf.float64) for tensor in (query, key, value))
    groups = query.shape[2] // key.shape[2]
    key, value = (tf.repeat(tensor, groups, axis=2) for tensor in (key, value))
    scores = tf.einsum("bqhd,bkhd->bhqk", query, key) * (query.shape[3] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores += tf.cast(bias, tf.float64)
    allowed = tf.ones_like(scores, tf.bool) if mask is None else tf.broadcast_to(mask, scores.shape)
    if causal:
        allowed &= np.tri(query.shape[1], key.shape[1], dtype=bool)
    if window:
        allowed &= ~np.tri(query.shape[1], key.shape[1], -window, dtype=bool)
    if lengths is not None:
        queries, keys = (tf.sequence_mask(each, one.shape[1]) for each, one in zip(lengths, (query, key), strict=True))
        allowed &= queries[:, None, :, None] & keys[:, None, None, :]
    scores = tf.where(allowed, scores, tf.constant(-1e300, tf.float64))
    weights = tf.where(tf.reduce_any(allowed, -1, keepdims=True), tf.nn.softmax(scores), 0)
    return tf.einsum("bhqk,bkhd->bqhd", weights, value)


def forms(batch=2, length=64, heads=4):
    """What cuDNN computes besides plain and causal attention: heads of the key, bias, options."""
    lengths = (np.full(batch, length, np.int32), np.array([length - 3 * number for number in range(batch)], np.int32))
    mask = np.random.default_rng(3).random((batch, 1, length, length)) > 0.5
    masking = np.where(mask, 0, -1e4)
    relative = draw(1, heads, length, length, seed=4)
    return {
        "mask": (heads, masking, {}),
        "mask alike for all": (heads, masking[:1], {}),
        "bias with its gradient": (heads, relative, {}),
        "causal with a bias": (heads, relative, {"causal": True}),
        "lengths": (heads, None, {"lengths": lengths}),
        "lengths, causal": (heads, None, {"lengths": lengths, "causal": True}),
        "lengths with a bias": (heads, relative, {"lengths": lengths}),
        "window": (heads, None, {"causal": True, "window": 9}),
        "groups": (heads // 2, None, {"causal": True}),
        "groups with a mask": (1, masking, {}),
        "groups with a window": (heads // 2, None, {"causal": True, "window": 9}),
    }


def with_gradients(function, *operands, jit_compile=False, **options):
    """The output of an attention and the gradients of a sum of it with fixed weights, as float64 arrays."""

    def step(*operands):
        with tf.GradientTape() as tape:
            tape.watch(operands)
            output = function(*operands, **options)
            loss = tf.reduce_sum(output * draw(*output.shape, dtype=output.dtype, seed=9))
        return output, *tape.gradient(loss, operands)

    step = tf.function(step, jit_compile=True) if jit_compile else step
    return [tf.cast(part, tf.float64).numpy() for part in step(*operands)]


def largest_error(found, expected):
    """The largest difference of any two entries, over the largest entry."""
    return max(np.abs(one - other).max() / np.abs(other).max() for one, other in zip(found, expected, strict=True))


def rounding(dtype, terms):
    """Relative error to expect of a sum of `terms` products that is rounded at every addition, as on a CPU without
    hardware for the type: errors of independent sign grow with the square root of their number.
    """
    return terms**0.5 * float(ml_dtypes.finfo(dtype).eps) / 2


class Block(keras.layers.Layer):
    """Causal self-attention inside a layer of one's own."""

    def __init__(self, attention, **options):
        super().__init__(**options)
        self.attention = attention

    def call(self, inputs, training=None):
        return inputs + self.attention(inputs, inputs, use_causal_mask=True, training=training)


def attention_net(policy="mixed_bfloat16", *, dropout=0.0, jit_compile=True, compiled=True, seed=7):
    """Two attention layers, the first one inside a layer; no batch size."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    heads = layers.MultiHeadAttention(2, 8, dropout=dropout, dtype=policy, name="heads")
    grouped = layers.GroupQueryAttention(8, 2, 1, dropout=dropout, dtype=policy, name="grouped")
    inputs = keras.Input((LENGTH, 16))
    x = Block(heads, dtype=policy, name="block")(inputs)
    x = grouped(x, x)
    model = keras.Model(inputs, layers.Dense(3, dtype="float32")(x))
    if compiled:
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    return model


def heads_net(policy="mixed_bfloat16", *, jit_compile=True, seed=7, **options):
    """One causal layer, of classes that Keras can load."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((LENGTH, 16))
    heads = keras.layers.MultiHeadAttention(2, 8, dtype=policy, name="heads", **options)
    model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(heads(inputs, inputs, use_causal_mask=True)))
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    return model


def attention_batch(examples=4, seed=0):
    return draw(examples, LENGTH, 16, seed=seed), draw(examples, LENGTH, 3, seed=seed + 1)


def fixed(examples=4, batches=2):
    """A dataset whose batch size XLA knows."""
    rows = attention_batch(examples * batches)
    return tf.data.Dataset.from_tensor_slices(rows).batch(examples, drop_remainder=True)
