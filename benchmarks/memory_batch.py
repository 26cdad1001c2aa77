"""GPT-2's step recomputed, with its loss in pieces, and accumulated; and a batch of 8 beside the one `find` recommends.

    python benchmarks/memory_batch.py [FOLDER] [--case NAME]

On a GPU, GPT-2 itself is trained, else a small one. What each way takes, in MiB, is what XLA's buffer assignment says.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import harness
import keras
import numpy as np

from tfopt import batch, kernels, precision
from tfopt.bench.cases import Case, Judge, Scale, Timer, Variant, flat_weights, same_values
from tfopt.bench.cases.kernels import GPT2_BATCH
from tfopt.bench.results import Check
from tfopt.bench.workloads import digits, gpt2
from tfopt.measure import StepTimer, StepTimes
from tfopt.memory import estimate, recompute

_TOLERANCE = 1e-3  # of losses, relative: in 16 bits, what is computed in another order differs by rounding
_LOSSES = 5  # that are compared, of a step that saves memory
_PIECES = 8  # "auto" would not divide a small model's logits
_STEPS, _SAMPLES = 6, 2
_PARTS = 4  # batches that are accumulated
_UPDATES = 3  # whose losses are compared
_BATCH_STEPS = 4
_FEW, _MOST = 8, 512  # examples in a batch
_Put = Callable[[keras.Model], Any] | None


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    return [_saving(training(scale)), _accumulating(training(scale)), _searching(scale)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its policy and its batches."""

    workload: str
    """The name of cases that train it."""
    policy: str
    examples: int
    """In a batch."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the model, where they are not GPT-2's own."""

    def net(self, put: Callable[[keras.Model], Any] | None = None) -> keras.Model:
        """Returns the model, always from the same weights, changed by `put`."""
        keras.utils.set_random_seed(0)
        with precision.policy(self.policy):
            net = gpt2.model(**self.sizes, jit_compile=True)
        if self.policy != "float32":
            kernels.use_flash_attention(net)
        if put is not None:
            put(net)
        return net

    def batch(self) -> tuple[Any, Any]:
        """Returns tokens and those that follow them, shape (examples, length) each."""
        sizes = {name: size for name, size in self.sizes.items() if name in ("length", "vocabulary")}
        return gpt2.batch(self.examples, **sizes)


_SMALL = Training(
    workload="gpt2, small",
    policy="float32",
    examples=4,
    sizes={"blocks": 3, "width": 96, "heads": 4, "vocabulary": 4096, "length": 192},
)
_WHOLE = Training(workload="gpt2", policy="mixed_bfloat16", examples=GPT2_BATCH)


def training(scale: Scale) -> Training:
    """The training of this size."""
    return _SMALL if scale.resnet is None else _WHOLE  # which only a GPU gets through in time


def same_losses(which: str) -> Judge:
    """Judges losses, which must be the baseline's; the first of the values is what a step takes, in MiB."""

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        mib, *losses = values
        within = f"within {100 * _TOLERANCE:g} % of the baseline's"
        return Check(
            what=f"MiB of a step by XLA's buffer assignment; losses {which}: {within}",
            values=tuple(values),
            passed=bool(np.allclose(losses, baseline[1:], rtol=_TOLERANCE, atol=0)),
            text=f"{mib:,.0f} MiB",
        )

    return judge


def _saving(trained: Training) -> Case:
    in_pieces = partial(kernels.chunk_cross_entropy, chunks=_PIECES)
    ways = (
        ("as Keras computes it", "all activations and logits are kept", None),
        ("recomputed", "tfopt.memory.recompute", recompute),
        ("activations recomputed", 'recompute(model, "activations")', partial(recompute, layers="activations")),
        ("loss in pieces", "tfopt.kernels.chunk_cross_entropy", in_pieces),
    )
    return Case(
        suite="memory",
        workload=trained.workload,
        question="How much memory does each technique save, and how much slower is a step?",
        unit="training step",
        variants=_variants(ways, partial(_timer, trained), partial(_found, trained)),
        judge=same_losses(f"of {_LOSSES} steps on one batch"),
    )


def _timer(trained: Training, put: _Put, stack: ExitStack) -> Timer:
    return partial(StepTimer(trained.net(put), trained.batch()), _STEPS, warmup=1, samples=_SAMPLES)


def _found(trained: Training, put: _Put) -> Sequence[float]:
    """MiB that a step takes, and the losses of the first steps on one batch."""
    net, batch = trained.net(put), trained.batch()
    return [estimate(net, batch).total_mib, *(float(net.train_on_batch(*batch)) for _ in range(_LOSSES))]


def _accumulating(trained: Training) -> Case:
    ways = (("one batch", "all examples at once", 1), ("accumulated", f"accumulate, {_PARTS} batches", _PARTS))
    return Case(
        suite="batch",
        workload=trained.workload,
        question=f"What does accumulating {_PARTS} batches cost beside one large batch, and what does it save?",
        unit=f"update of {trained.examples} examples",
        variants=_variants(ways, partial(_update_timer, trained), partial(_updates, trained)),
        judge=same_losses(f"after each of {_UPDATES} updates"),
    )


def _searching(scale: Scale) -> Case:
    ways = ((f"batch of {_FEW}", "a first script's", False), ("recommended", f"tfopt.batch.find, up to {_MOST}", True))
    return Case(
        suite="batch",
        workload="digits",
        question="How much faster are examples in a batch of the size that tfopt.batch.find recommends?",
        unit=f"{_MOST} examples",
        variants=_variants(ways, partial(_examples_timer, scale), partial(_weights, scale)),
        judge=same_values("every weight after the search, bit for bit", "same weights"),
    )


def _variants(
    ways: Iterable[tuple[str, str, Any]], timer: Callable[..., Timer], values: Callable[..., Sequence[float]]
) -> list[Variant]:
    """A variant for each name, note and argument of `timer` and `values`."""
    return [
        Variant(name=name, note=note, timer=partial(timer, way), values=partial(values, way))
        for name, note, way in ways
    ]


def _update_timer(trained: Training, parts: int, stack: ExitStack) -> Timer:
    net, data = trained.net(), trained.batch()
    batch.accumulate(net, parts)
    timer = StepTimer(net, tuple(each[: trained.examples // parts] for each in data))
    return lambda: _times(timer(_BATCH_STEPS * parts, warmup=parts, samples=_SAMPLES), trained.examples)


def _times(times: StepTimes, examples: int) -> StepTimes:
    """The same samples as times for so many examples."""
    factor = examples / (times.examples_per_step or examples)
    scaled = tuple(tuple(factor * sample for sample in repeat) for repeat in times.repeats_ms)
    return replace(times, repeats_ms=scaled, examples_per_step=examples)


def _updates(trained: Training, parts: int) -> Sequence[float]:
    """MiB that a step takes, and the losses of all examples after each update."""
    net, data = trained.net(), trained.batch()
    batch.accumulate(net, parts)
    small = [tuple(part) for part in zip(*(np.split(each, parts) for each in data), strict=True)]
    losses = []
    for _ in range(_UPDATES):
        for part in small:
            net.train_on_batch(*part)
        losses.append(float(net.evaluate(*data, batch_size=len(small[0][0]), verbose=0)))
    return [estimate(net, small[0]).total_mib, *losses]


def _examples_timer(scale: Scale, search: bool, stack: ExitStack) -> Timer:
    net, size = digits.conv_net(width=scale.width), _FEW
    if search:
        size = batch.find(net, digits.batch(_MOST), largest=_MOST).recommended
    timer = StepTimer(net, digits.batch(size))
    steps = max(1, _BATCH_STEPS * _MOST // size)
    return lambda: _times(timer(steps, warmup=_BATCH_STEPS, samples=_SAMPLES), _MOST)


def _weights(scale: Scale, search: bool) -> Sequence[float]:
    net = digits.conv_net(width=scale.width)
    net.set_weights([np.full(weights.shape, 0.1) for weights in net.get_weights()])
    if search:
        batch.find(net, digits.batch(_MOST), largest=4 * _FEW)
    return flat_weights(net)


if __name__ == "__main__":
    harness.run_cases(__doc__, cases)
