"""Tries each form of cuDNN's attention on this machine before a model takes it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.kernels.cudnn.calls import flash_attention
from tfopt.kernels.cudnn.modules import AttentionSpec

# Of the largest entry. Each result is rounded once, and the gradients start from a rounded output: 0.02 and 0.003 at
# most. What a wrong mask or scale does is larger than both.
_LARGEST_ERROR = {"bfloat16": 0.05, "float16": 0.01}
_BATCH, _LENGTH, _WINDOW = 2, 128, 32
_OF_THE_MOMENT = (tf.errors.ResourceExhaustedError, tf.errors.UnavailableError, tf.errors.AbortedError)

FILL = {"bfloat16": -1e9, "float16": -3e4}
"""What a mask adds to a score: far below all others, and finite, or rows that are masked whole would be NaN."""


def defect(spec: AttentionSpec) -> str | None:
    """Says what is wrong with a form of cuDNN's attention on this machine; None if it computes what it should.

    A small attention of the same form is compiled and run once in a process, with its gradients, and compared with one
    that TensorFlow computes in float32.
    """
    try:
        return _defect(_small(spec))
    except tf.errors.OpError as error:  # of the moment, such as no memory: another attention may ask again
        return f"cuDNN could not be tried here: {_first_line(error)}"


def _small(spec: AttentionSpec) -> AttentionSpec:
    key_heads = min(2, spec.key_heads)
    heads = key_heads * spec.heads // spec.key_heads
    length = _LENGTH + spec.query_length % 8
    same = spec.query_length == spec.key_length
    bias = spec.bias
    return replace(
        spec,
        batch=_BATCH,
        query_length=length,
        key_length=length if same else _LENGTH + 64 + spec.key_length % 8,
        heads=heads,
        key_heads=key_heads,
        window=min(spec.window, _WINDOW),
        bias=bias and (min(bias[0], _BATCH), heads if bias[1] > 1 else 1),
        scale=spec.size**-0.5,
    )


@cache
def _defect(spec: AttentionSpec) -> str | None:
    with ThreadPoolExecutor(1) as pool:  # outside the step that is being traced, its tape and its device
        return pool.submit(_try, spec).result()


def _try(spec: AttentionSpec) -> str | None:
    operands, lengths = _operands(spec)

    def flash(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, bias: tf.Tensor | None = None) -> tf.Tensor:
        options: dict[str, Any] = {"scale": spec.scale, "causal": spec.causal, "window": spec.window}
        return flash_attention(query, key, value, bias=bias, lengths=lengths if spec.lengths else None, **options)

    def plain(*operands: tf.Tensor) -> tf.Tensor:
        return _attend(spec, *(tf.cast(operand, tf.float32) for operand in operands))

    present = _present(spec, operands)
    try:
        step = tf.function(_with_gradients, autograph=False, jit_compile=True)
        found = [tf.identity(each) for each in step(flash, operands, present, spec)]
    except _OF_THE_MOMENT:
        raise
    except Exception as error:  # noqa: BLE001  whatever it is, the layer's own path remains
        return f"cuDNN refuses this form here: {_first_line(error)}"
    expected = _with_gradients(plain, operands, present, spec)
    largest = max(_error(one, other) for one, other in zip(found, expected, strict=True))
    if largest <= _LARGEST_ERROR[spec.dtype]:
        return None
    return f"cuDNN computes this form wrongly here: an error of {largest:.2g} of the largest entry"


def _operands(spec: AttentionSpec) -> tuple[list[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    """Query, key, value and bias, drawn; and the numbers of queries and keys of each example."""
    draw = np.random.default_rng(0).normal
    operands = [tf.cast(draw(size=shape), dtype) for shape, dtype in (spec.query, spec.key, spec.key)]
    for shape, dtype in spec.bias_types:
        values = draw(size=shape)
        if shape[1] == 1:  # as of a mask; the last query may attend to nothing
            values = np.where((values > 0) & (np.arange(shape[2]) < shape[2] - 1)[:, None], 0, FILL[dtype])
        operands.append(tf.cast(values, dtype))
    return operands, (tf.constant([spec.query_length] * spec.batch), tf.constant(_keys(spec)))


def _keys(spec: AttentionSpec) -> list[int]:
    """How many keys each example has, if that is an operand: some, and none."""
    return [spec.key_length - 5, 0]


def _allowed(spec: AttentionSpec) -> Any:
    """Which keys a query attends to, apart from the bias: (batch or 1, 1, query length, key length)."""
    shape = spec.query_length, spec.key_length
    allowed = np.tri(*shape, dtype=bool) if spec.causal else np.ones(shape, bool)
    if spec.window:
        allowed &= ~np.tri(*shape, -spec.window, dtype=bool)
    if spec.lengths:
        return allowed & (np.arange(spec.key_length) < np.array(_keys(spec))[:, None, None, None])
    return allowed[None, None]


def _present(spec: AttentionSpec, operands: list[tf.Tensor]) -> Any:
    """Whether a query attends to something: (batch or 1, query length, 1, 1)."""
    allowed = _allowed(spec)
    if spec.bias is not None and spec.bias[1] == 1:
        allowed = allowed & (tf.cast(operands[3], tf.float32).numpy() > FILL[spec.dtype] / 2)
    return allowed.any(-1)[:, 0, :, None, None]


def _with_gradients(function: Any, operands: Any, present: Any, spec: AttentionSpec) -> list[tf.Tensor]:
    """The output where a query attends to something, and the gradients of what has one."""
    sources = list(operands[: 4 if spec.bias == (1, spec.heads) else 3])
    with tf.GradientTape() as tape:
        tape.watch(sources)
        output = tf.where(present, tf.cast(function(*operands), tf.float32), 0.0)
        upstream = tf.cast(np.random.default_rng(1).normal(size=output.shape), tf.float32)
        loss = tf.reduce_sum(output * upstream)
    return [tf.cast(each, tf.float32) for each in (output, *tape.gradient(loss, sources))]


def _attend(
    spec: AttentionSpec,
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    bias: tf.Tensor | None = None,
) -> tf.Tensor:
    """The attention of a form, each step of it written out."""
    key, value = (tf.repeat(each, spec.heads // spec.key_heads, axis=2) for each in (key, value))
    scores = spec.scale * tf.einsum("bqhd,bkhd->bhqk", query, key)
    scores += 0.0 if bias is None else bias
    return tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(tf.where(_allowed(spec), scores, -1e30)), value)


def _first_line(error: Exception) -> str:
    return str(getattr(error, "message", error)).partition("\n")[0][:200]


def _error(found: tf.Tensor, expected: tf.Tensor) -> float:
    """The largest difference, over the largest entry; infinite if anything is no number."""
    error = float(tf.reduce_max(tf.abs(found - expected)) / tf.reduce_max(tf.abs(expected)))
    return error if np.isfinite(error) else float("inf")
