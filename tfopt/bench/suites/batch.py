"""A large batch beside the same accumulated from small ones, and a batch of 8 beside the one that `find` recommends."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tfopt import batch
from tfopt.bench.cases import Case, Scale, Timer, Variant, flat_weights, same_values
from tfopt.bench.cases.training import Training, same_losses, training
from tfopt.bench.workloads import digits
from tfopt.measure import StepTimer, StepTimes
from tfopt.memory import estimate

_PARTS = 4  # batches that are accumulated
_UPDATES = 3  # whose losses are compared
_STEPS, _SAMPLES = 4, 2
_FEW, _MOST = 8, 512  # examples in a batch


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    return [_accumulating(training(scale)), _searching(scale)]


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
    return lambda: _times(timer(_STEPS * parts, warmup=parts, samples=_SAMPLES), trained.examples)


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
    steps = max(1, _STEPS * _MOST // size)
    return lambda: _times(timer(steps, warmup=_STEPS, samples=_SAMPLES), _MOST)


def _weights(scale: Scale, search: bool) -> Sequence[float]:
    net = digits.conv_net(width=scale.width)
    net.set_weights([np.full(weights.shape, 0.1) for weights in net.get_weights()])
    if search:
        batch.find(net, digits.batch(_MOST), largest=4 * _FEW)
    return flat_weights(net)
