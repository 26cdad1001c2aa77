"""Processes that train together: bare tf.distribute, tfopt's layer over it, one process alone; and all GPUs."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.bench.cases.replicas import Group, Job, Training, reduction_times
from tfopt.bench.results import Check, CommunicationResult, RingModel
from tfopt.hardware.host_activity import sent_bytes
from tfopt.hardware.host_limits import usable_cpus
from tfopt.measure import StepTimes

_PROCESSES = 2
_GLOBAL_BATCH_SIZE = 256  # of both; one alone takes half
_DEVICE_BATCH_SIZE = 4096
_CHECK_STEPS = 20
_ALONE = "one process"
_TOLERANCE = 1e-4  # of the weights' length: float32, summed in another order, through Adam


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size: two processes on CPUs, and with several GPUs all of them beside one."""
    gpus = [gpu.name.removeprefix("/device:") for gpu in tf.config.list_logical_devices("GPU")]
    return [_processes_case(scale.steps // 2), *([devices_case(gpus, scale.steps)] if len(gpus) > 1 else [])]


def _processes_case(steps: int) -> Case:
    bare, tfopt, alone = _Processes("tensorflow", _PROCESSES), _Processes("tfopt", _PROCESSES), _Processes("none", 1)
    setups = {
        "tf.distribute": (bare, True, "MultiWorkerMirroredStrategy and a loop by hand: stock Keras cannot fit there"),
        "strategy()": (tfopt, True, "tfopt.distribute.strategy() and the same loop; goal: 0.98 of the speed"),
        "strategy(), fit": (tfopt, False, "the same with model.fit"),
        _ALONE: (alone, True, "on one of the CPUs, with one worker's part of the batch"),
    }
    return Case(
        suite="distribute",
        workload=f"mlp, {_PROCESSES} processes",
        question="What does tfopt's layer add to a step of tf.distribute, and what does the second process bring?",
        unit="step",
        variants=[
            Variant(
                name=name,
                note=note,
                timer=partial(processes.timer, by_hand, steps),
                values=partial(processes.weights, by_hand),
                ceiling=name == _ALONE,
                gpus=0,
            )
            for name, (processes, by_hand, note) in setups.items()
        ],
        judge=_same_weights,
        communication=partial(
            _communication_of_processes, tfopt, {name: each for name, (each, by_hand, _) in setups.items() if by_hand}
        ),
    )


class _Processes:
    """Processes that train under one layer, as in `Job`; keeps what was measured in them after their end."""

    def __init__(self, layer: str, count: int):
        self._layer, self._count = layer, count
        self._group: Group | None = None
        self._weights: dict[bool, Sequence[float]] = {}
        self._first_step_seconds = 0.0
        self.start_to_first_step_seconds = 0.0
        self.gradient_bytes = 0
        self.sent_bytes: float | None = None
        self.reduction_ms: Mapping[int, float] = {}

    def timer(self, by_hand: bool, steps: int, stack: ExitStack) -> Timer:
        """Trains for the comparison of weights, and returns what times `steps` steps."""
        group = self._group or self._start(stack)
        training: dict[str, Any] = {"batch_size": _GLOBAL_BATCH_SIZE, "by_hand": by_hand}
        left = _CHECK_STEPS - 1 if by_hand else _CHECK_STEPS  # the first by hand was taken at the start
        before = sent_bytes()
        group.ask("train", **training, steps=left)
        after = sent_bytes()
        if by_hand and before is not None and after is not None:
            self.sent_bytes = (after - before) / left / self._count
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.npy")
            group.ask("save", **training, path=str(path))
            self._weights[by_hand] = np.load(path)
        return partial(self._time, group, by_hand, steps)

    def weights(self, by_hand: bool) -> Sequence[float]:
        """Weights after the steps that `timer` has taken."""
        return self._weights[by_hand]

    def _start(self, stack: ExitStack) -> Group:
        cpus = usable_cpus()
        jobs = [Job(self._layer, rank, cpus[rank] if len(cpus) > 1 else None) for rank in range(self._count)]
        self._group = group = stack.enter_context(Group(jobs))
        group.answers()
        ready = time.monotonic()
        first, *_ = group.ask("train", batch_size=_GLOBAL_BATCH_SIZE, by_hand=True, steps=1)
        self._first_step_seconds = time.monotonic() - ready
        self.start_to_first_step_seconds = time.monotonic() - group.started
        self.gradient_bytes = first["gradient_bytes"]
        if self._count > 1:
            times, *_ = group.ask("reduce")
            self.reduction_ms = {int(size): StepTimes.from_dict(each).median_ms for size, each in times.items()}
        return group

    def _time(self, group: Group, by_hand: bool, steps: int) -> StepTimes:
        batch_size = _GLOBAL_BATCH_SIZE // _PROCESSES * self._count
        answer, *_ = group.ask("time", batch_size=batch_size, by_hand=by_hand, steps=steps, warmup=2, samples=4)
        times = StepTimes.from_dict(answer)
        # fit sees one worker's part of the batch, and the timer's first step by hand was not the first.
        first = self._first_step_seconds if by_hand else times.first_step_seconds
        return replace(times, examples_per_step=batch_size, first_step_seconds=first)


def _communication_of_processes(
    tfopt: _Processes, groups: Mapping[str, _Processes], times: Mapping[str, StepTimes]
) -> CommunicationResult:
    return CommunicationResult(
        replicas=_PROCESSES,
        sent_bytes_per_step=tfopt.sent_bytes,
        model=RingModel.measured(
            compute_ms=times[_ALONE].median_ms,
            gradient_bytes=tfopt.gradient_bytes,
            replicas=_PROCESSES,
            reduction_ms=tfopt.reduction_ms,
        ),
        start_to_first_step_seconds={name: each.start_to_first_step_seconds for name, each in groups.items()},
    )


def devices_case(devices: Sequence[str], steps: int) -> Case:
    """All devices, by names such as "GPU:0", and one: each with the same batch, so that only the all-reduce differs."""
    strategies = {count: cache(partial(_mirrored, devices[:count])) for count in (len(devices), 1)}
    return Case(
        suite="distribute",
        workload=f"mlp, {len(devices)} devices",
        question="What do more devices bring, with the same batch for each?",
        unit="step",
        variants=[_devices_variant(strategy, count, steps) for count, strategy in strategies.items()],
        judge=_same_weights,
        communication=partial(_communication_of_devices, strategies[len(devices)], len(devices)),
    )


def _devices_variant(strategy: Callable[[], tf.distribute.Strategy], count: int, steps: int) -> Variant:
    def timer(stack: ExitStack) -> Timer:
        timer = Training(strategy(), count * _DEVICE_BATCH_SIZE, by_hand=True).timer
        return partial(timer, steps, warmup=2, samples=4)

    return Variant(
        name=f"{count} device{'s' * (count > 1)}",
        note=f"{count * _DEVICE_BATCH_SIZE} examples a step",
        timer=timer,
        values=lambda: _trained(strategy(), _DEVICE_BATCH_SIZE),
        gpus=count,
        ceiling=count == 1,
    )


def _mirrored(devices: Sequence[str]) -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(devices) if len(devices) > 1 else tf.distribute.get_strategy()


def _trained(strategy: tf.distribute.Strategy, batch_size: int) -> Sequence[float]:
    training = Training(strategy, batch_size, by_hand=True)
    training.train(_CHECK_STEPS)
    weights: Sequence[float] = training.weights()
    return weights


def _communication_of_devices(strategy: Any, replicas: int, times: Mapping[str, StepTimes]) -> CommunicationResult:
    reductions = reduction_times(strategy())
    model = RingModel.measured(
        compute_ms=times["1 device"].median_ms,
        gradient_bytes=Training(strategy(), replicas, by_hand=True).gradient_bytes,
        replicas=replicas,
        reduction_ms={size: each.median_ms for size, each in reductions.items()},
    )
    return CommunicationResult(replicas=replicas, sent_bytes_per_step=None, model=model, start_to_first_step_seconds={})


def _same_weights(expected: Sequence[float], values: Sequence[float]) -> Check:
    """Judges weights by the norm of their difference."""
    apart = float(np.linalg.norm(np.subtract(values, expected)) / np.linalg.norm(expected))
    passed = apart <= _TOLERANCE
    return Check(
        what=f"weights after {_CHECK_STEPS} steps of the same global batches: within {_TOLERANCE:g} of their length",
        values=(apart,),
        passed=passed,
        text="same weights" if passed else f"{apart:.1g} apart",
    )
