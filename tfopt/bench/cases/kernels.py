"""tfopt's kernels beside Keras' own paths, on a GPU: GPT-2, attention alone and batch norm."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt import kernels, memory, precision
from tfopt.bench.cases import Case, DrawTimer, Timer, Variant
from tfopt.bench.results import Check
from tfopt.bench.workloads import gpt2, photos
from tfopt.errors import UnsupportedError
from tfopt.kernels.attention.call import AttentionCall
from tfopt.measure import StepTimer

_POLICY, _DTYPE = "mixed_bfloat16", "bfloat16"
GPT2_BATCH = 16
_STEPS, _WARMUP, _SAMPLES = 10, 1, 2
_CHAINED = 8  # attentions in a call: one takes half a millisecond, which a call's own cost on the host would hide
_CALLS = 30


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one attention."""

    batch: int
    length: int
    heads: int
    size: int
    causal: bool
    padded: bool = False  # each example to the length, at its end

    def __str__(self) -> str:
        options = ", causal" * self.causal + ", padded" * self.padded
        return f"{self.batch}×{self.length}, {self.heads} heads of {self.size}{options}"


_SHAPES = (
    Shape(16, 1024, 12, 64, causal=True),  # that of GPT-2
    Shape(16, 1024, 12, 64, causal=False),
    Shape(16, 512, 16, 64, causal=False),
    Shape(4, 4096, 12, 64, causal=True),
    Shape(4, 2048, 16, 128, causal=True),
    Shape(16, 1024, 12, 64, causal=True, padded=True),
)


def gpt2_case() -> Case:
    """Returns the case of GPT-2 with Keras' attention and with cuDNN's, whose peak memory it records."""
    return Case(
        suite="fit",
        workload="gpt2",
        question="What does flash attention do to GPT-2, 124 million parameters (mixed_bfloat16, XLA)?",
        unit="training step",
        variants=[
            Variant(name="Keras' attention", note="as it is", timer=partial(_gpt2_timer, None), dtype=_DTYPE),
            Variant(
                name="flash attention",
                note="use_flash_attention; goal: 1.1 times compiled PyTorch's speed, in no more memory",
                timer=partial(_gpt2_timer, kernels.use_flash_attention),
                dtype=_DTYPE,
            ),
            Variant(
                name="flash attention, activations recomputed",
                note='the same and memory.recompute(model, "activations")',
                timer=partial(_gpt2_timer, _flash_and_recomputed),
                dtype=_DTYPE,
            ),
        ],
        model=gpt2.model,
    )


def batch_norm_case(batch_size: int) -> Case:
    """Returns the case of ResNet-50 without XLA, with Keras' batch norm and with the fused kernel."""
    timer = partial(_resnet_timer, batch_size)
    return Case(
        suite="fit",
        workload="resnet50, no XLA",
        question="What does the fused batch norm do to ResNet-50 where XLA is off (mixed_bfloat16)?",
        unit="training step",
        variants=[
            Variant(name="Keras' batch norm", note="as it is", timer=partial(timer, None)),
            Variant(name="fused batch norm", note="fuse_batch_norm", timer=partial(timer, kernels.fuse_batch_norm)),
        ],
    )


def attention_cases() -> list[Case]:
    """Lists cases of attention alone, forward and backward, in several shapes, which check its error."""
    return [
        Case(
            suite="fit",
            workload=f"attention, {shape}",
            question="What does flash attention gain alone, forward and backward (bfloat16, XLA)?",
            unit=f"chain of {_CHAINED} forward and backward passes",
            variants=[
                Variant(
                    name=name,
                    note=note,
                    timer=partial(_attention_timer, shape, attend),
                    values=partial(_errors, shape, attend),
                )
                for name, note, attend in (
                    ("Keras' attention", "keras.ops.dot_product_attention", _plain),
                    ("flash attention", "tfopt.kernels.dot_product_attention; goal: 2.5 times the speed", _flash),
                )
            ],
            judge=_no_larger_error,
        )
        for shape in _SHAPES
    ]


_Attend = Callable[..., tf.Tensor]
_Put = Callable[[keras.Model], Any] | None


def _gpt2_timer(put: _Put, stack: ExitStack) -> Timer:
    with precision.policy(_POLICY):
        net = gpt2.model(jit_compile=True)
    return _step_timer(net, put, gpt2.batch(GPT2_BATCH))


def _flash_and_recomputed(net: keras.Model) -> None:
    kernels.use_flash_attention(net)
    memory.recompute(net, "activations")


def _resnet_timer(batch_size: int, put: _Put, stack: ExitStack) -> Timer:
    with precision.policy(_POLICY):
        net = photos.resnet50(jit_compile=False)
    return _step_timer(net, put, photos.batch(batch_size, count=photos.PHOTOGRAPHS))


def _step_timer(net: keras.Model, put: _Put, batch: Any) -> Timer:
    if put is not None:
        put(net)
    timer = StepTimer(net, batch)
    if put is not None:
        expect_kernel(net)
    return partial(timer, _STEPS, warmup=_WARMUP, samples=_SAMPLES)


def expect_kernel(net: keras.Model) -> None:
    """Raises `UnsupportedError` if a traced net runs on Keras' own path, which must not pass for the kernel's."""
    _expect_none(reason for row in kernels.explain(net).layers for reason in row.training or ())


def _expect_none(reasons: Iterator[str]) -> None:
    found = ", ".join(dict.fromkeys(reasons))
    if found:
        raise UnsupportedError(
            f"Expected a step through the kernel. Found Keras' own path: {found}. Run it on a GPU from Ampere on."
        )


def _plain(query: Any, key: Any, value: Any, *, causal: bool, mask: Any) -> tf.Tensor:
    return keras.ops.dot_product_attention(query, key, value, is_causal=causal, mask=mask)


def _flash(query: Any, key: Any, value: Any, *, causal: bool, mask: Any) -> tf.Tensor:
    scale, masks = query.shape[3] ** -0.5, () if mask is None else (mask,)
    output, found = AttentionCall(query=query, key=key, value=value, scale=scale, causal=causal, masks=masks).attempt()
    _expect_none(iter(found))
    return output


def _attention_timer(shape: Shape, attend: _Attend, stack: ExitStack) -> Timer:
    step, operands = _compiled(shape, attend, _CHAINED), _operands(shape)
    return partial(DrawTimer(lambda: [step(*operands)], shape.batch), _CALLS, warmup=_WARMUP, samples=_SAMPLES)


def _compiled(shape: Shape, attend: _Attend, chained: int = 1) -> Callable[..., list[tf.Tensor]]:
    """Attentions, each with the last one's output as its query, and their gradients."""

    mask = _mask(shape)

    def step(query: Any, key: Any, value: Any, upstream: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = query
            for _ in range(chained):
                output = attend(output, key, value, causal=shape.causal, mask=mask)
        return [output, *tape.gradient(output, [query, key, value], output_gradients=upstream)]

    compiled: Callable[..., list[tf.Tensor]] = tf.function(step, jit_compile=True, autograph=False)
    return compiled


def _operands(shape: Shape) -> list[tf.Tensor]:
    """Query, key, value and the gradient that comes back to the output, (batch, length, heads, size) each."""
    sizes = (shape.batch, shape.length, shape.heads, shape.size)
    return [tf.random.stateless_normal(sizes, (0, number), dtype=tf.bfloat16) for number in range(4)]


def _mask(shape: Shape) -> tf.Tensor | None:
    """Where the examples are, a quarter of the length in the first, all of it in the last: (batch, 1, 1, length)."""
    if not shape.padded:
        return None
    lengths = np.linspace(shape.length // 4, shape.length, shape.batch).astype(int)
    return tf.constant(np.arange(shape.length) < lengths[:, None, None, None])


def _errors(shape: Shape, attend: _Attend) -> Sequence[float]:
    """Returns relative RMS errors of the first example's output and its three gradients."""
    operands = _operands(shape)
    exact = _exact(shape, *(tf.cast(operand[:1], tf.float64) for operand in operands))
    found = [tf.cast(result[:1], tf.float64) for result in _compiled(shape, attend)(*operands)]
    return [float(tf.norm(one - other) / tf.norm(other)) for one, other in zip(found, exact, strict=True)]


def _exact(shape: Shape, query: Any, key: Any, value: Any, upstream: Any) -> list[tf.Tensor]:
    """Attention written out, in float64, and its gradients."""
    with tf.GradientTape() as tape:
        tape.watch([query, key, value])
        scores = tf.einsum("bqhd,bkhd->bhqk", query, key) * shape.size**-0.5
        if shape.causal:
            scores += tf.constant(np.triu(np.full((shape.length, shape.length), -np.inf), 1))
        if (mask := _mask(shape)) is not None:
            scores = tf.where(mask[:1], scores, -np.inf)
        output = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), value)
    return [output, *tape.gradient(output, [query, key, value], output_gradients=upstream)]


def _no_larger_error(baseline: Sequence[float], values: Sequence[float]) -> Check:
    worst = float(np.max(values))
    return Check(
        what="relative error of the output and of three gradients against float64, the largest: the baseline's at most",
        values=tuple(values),
        passed=worst <= float(np.max(baseline)),
        text=f"error {worst:.1e}",
    )
