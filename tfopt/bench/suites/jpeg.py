"""ResNet-50 trained from JPEG files, beside what the step alone and the decoding alone allow."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt import fit, precision
from tfopt.bench.cases import Case, Timer, Variant
from tfopt.bench.drawing import DrawTimer
from tfopt.bench.workloads import crops, photos, resnet50
from tfopt.measure import FitTimer, StepTimer
from tfopt.model.batches import repeated
from tfopt.pipelines import RandomCrop, build_pipeline, images

_STEPS, _WARMUP, _SAMPLES = 20, 8, 2
_TIMES = 8  # the photographs over, so that no epoch ends while steps are timed


def case(folder: Path, batch_size: int) -> Case:
    """A first script's input, `build_pipeline` under overlapped `fit`, and both ceilings.

    Args:
        folder: Photographs.
        batch_size: Examples a step.
    """
    naive = cache(partial(crops.naive, folder, batch_size, times=_TIMES))
    pipeline = cache(partial(_pipeline, folder, batch_size, "auto"))
    on_host = cache(partial(_pipeline, folder, batch_size, None))
    batch = cache(lambda: next(iter(on_host())))
    policy = precision.recommend().policy
    dtype = policy.removeprefix("mixed_")
    ways: dict[str, tuple[str, Callable[[ExitStack], Timer]]] = {
        "naive input": ("decoded whole, cropped, one file after the other", partial(_fit_timer, policy, naive, False)),
        "build_pipeline, overlap": (
            "goal: 0.9 of the step alone's speed, or 0.95 of the input alone's",
            partial(_fit_timer, policy, pipeline, True),
        ),
        "step alone": ("a ceiling: one batch, on the device", partial(_step_timer, policy, batch)),
        "input alone": (
            "a ceiling: what the CPUs decode, drawn and thrown away",
            partial(_draw_timer, on_host, batch_size),
        ),
    }
    return Case(
        suite="pipeline",
        workload="resnet50 from JPEG",
        question=f"Does the input keep up with ResNet-50 ({policy}, XLA), with a random crop of each JPEG?",
        unit="step",
        variants=[
            Variant(
                name=name,
                note=note,
                timer=timer,
                ceiling=name.endswith("alone"),
                recommended=name == "build_pipeline, overlap",
                dtype=None if name == "input alone" else dtype,
            )
            for name, (note, timer) in ways.items()
        ],
        model=resnet50.model,
    )


def _pipeline(folder: Path, batch_size: int, device: str | None) -> tf.data.Dataset:
    once = images(folder)
    over = replace(once, dataset=lambda: once.dataset().repeat(_TIMES), count=_TIMES * (once.count or 0))
    return build_pipeline(over, batch_size=batch_size, crop=RandomCrop(photos.SIZE), cache=None, device=device)


def _net(policy: str) -> Any:
    with precision.policy(policy):
        return resnet50.model(jit_compile=True)


def _fit_timer(policy: str, make: Callable[[], tf.data.Dataset], overlapped: bool, stack: ExitStack) -> Timer:
    net = _net(policy)
    if overlapped:
        fit.overlap(net)
        stack.callback(fit.undo, net)
    return partial(FitTimer(net, make()), _STEPS, warmup=_WARMUP, samples=_SAMPLES)


def _step_timer(policy: str, batch: Callable[[], Any], stack: ExitStack) -> Timer:
    return partial(StepTimer(_net(policy), batch()), _STEPS, warmup=1, samples=_SAMPLES)


def _draw_timer(make: Callable[[], tf.data.Dataset], batch_size: int, stack: ExitStack) -> Timer:
    dataset = repeated(make())
    return partial(DrawTimer(lambda: dataset, batch_size), _STEPS, warmup=_WARMUP, samples=_SAMPLES)
