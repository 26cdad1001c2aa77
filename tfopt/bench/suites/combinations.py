"""ResNet-50 under every policy with XLA and without: the step alone and through fit, with the memory each needs."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

from tfopt import precision
from tfopt.bench.cases import Case, Timer, Variant
from tfopt.bench.workloads import resnet50
from tfopt.measure import FitTimer, StepTimer
from tfopt.pipelines import build_pipeline

_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# The slowest of them takes 0.3 s a step, and each step is long beside the wait at a sample's end.
_STEPS, _SAMPLES = 10, 2
_BATCHES = 4  # in the photographs that fit draws from


def cases(batch_size: int, photographs: int) -> list[Case]:
    """The step alone, on a batch that lies on the device, and the same through fit, fed from the host.

    Args:
        batch_size: Examples a step.
        photographs: How many files the examples are taken from.
    """
    resident = cache(partial(resnet50.batch, batch_size, count=photographs))
    many = cache(partial(resnet50.batch, _BATCHES * batch_size, count=photographs))
    question = "Which policy trains ResNet-50 fastest, with XLA or without?"
    case = partial(Case, suite="precision", question=question, model=resnet50.model)
    return [
        case(workload="resnet50", unit="training step", variants=_variants(partial(_step_timer, resident))),
        case(workload="resnet50, fit", unit="step of fit", variants=_variants(partial(_fit_timer, many, batch_size))),
    ]


def _variants(timer: Callable[[str, bool, ExitStack], Timer]) -> list[Variant]:
    recommended = precision.recommend().policy
    return [
        Variant(
            name=f"{policy}, XLA" if jit else policy,
            note=f"dtype policy {policy}, jit_compile={jit}",
            timer=partial(timer, policy, jit),
            recommended=jit and policy == recommended,
            dtype="tensorfloat32" if policy == "float32" else policy.removeprefix("mixed_"),
        )
        for policy in _POLICIES
        for jit in (False, True)
    ]


def _step_timer(data: Callable[[], Any], policy: str, jit: bool, stack: ExitStack) -> Timer:
    with precision.policy(policy):
        timer = StepTimer(resnet50.model(jit_compile=jit), data())
    return partial(timer, _STEPS, warmup=1, samples=_SAMPLES)


def _fit_timer(data: Callable[[], Any], batch_size: int, policy: str, jit: bool, stack: ExitStack) -> Timer:
    arrays = tuple(part.numpy() for part in data())
    # fit's timer repeats the dataset, and nothing may follow a copy to the device.
    dataset = build_pipeline(arrays, batch_size=batch_size, device=None)
    with precision.policy(policy):
        timer = FitTimer(resnet50.model(jit_compile=jit), dataset)
    return partial(timer, _STEPS, warmup=1, samples=_SAMPLES)
