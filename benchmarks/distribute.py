"""Processes that train together: bare tf.distribute, tfopt's layer over it, one process alone; and all GPUs.

    python benchmarks/distribute.py [FOLDER] [--case NAME]

Two processes, each on its own CPU core and without a GPU, train a 784-512-512-10 perceptron; with several GPUs, one
process also trains on all of them and on one. The batch size per replica is fixed, so one replica alone is the ceiling,
and the share of its speed that several reach is the scaling efficiency. Also reported are the bytes that each process
sends per step, counted on the loopback interface, beside those that a ring would take; the bytes of optimizer state
with `shard_optimizer`; the time from the start to the end of the first step; and the step that compute, latency and
bandwidth predict for 8 and 64 replicas, which is never measured.
"""

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import harness
import numpy as np
import tensorflow as tf
from replicas import READ_EXAMPLES, Group, Job, Training, reduction_times

from tfopt.bench.cases import Case, Scale, Timer, Variant, same_values
from tfopt.bench.results import Check, CommunicationResult, RingModel
from tfopt.hardware.host_activity import sent_bytes
from tfopt.hardware.host_limits import usable_cpus
from tfopt.measure import StepTimes

_PROCESSES = 2
# Arguments of `Training`, in the processes.
_BY_HAND: dict[str, Any] = {"by_hand": True}
_FIT: dict[str, Any] = {"by_hand": False}
_SHARDED: dict[str, Any] = {"by_hand": False, "sharded": True}
_LOCAL: dict[str, Any] = {"by_hand": False, "local_steps": 8}
_READERS = (1, 2, 4)
_GLOBAL_BATCH_SIZE = 256  # of both; one alone takes half
_DEVICE_BATCH_SIZE = 4096
_READ_BATCH_SIZE = 128
_CHECK_STEPS = 20
_ALONE = "one process"
_TOLERANCE = 1e-4  # of the weights' length: float32, summed in another order, through Adam
_GUESSING = math.log(10)  # the loss of an untrained net on ten digits


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size: processes on CPUs, and with several GPUs all of them beside one."""
    gpus = [gpu.name.removeprefix("/device:") for gpu in tf.config.list_logical_devices("GPU")]
    steps = scale.steps // 2
    devices = [devices_case(gpus, scale.steps)] if len(gpus) > 1 else []
    return [_processes_case(steps), _local_steps_case(steps), _input_case(steps), *devices]


def _processes_case(steps: int) -> Case:
    bare, tfopt, alone = _Processes("tensorflow", _PROCESSES), _Processes("tfopt", _PROCESSES), _Processes("none", 1)
    setups = {
        "tf.distribute": (
            bare,
            _BY_HAND,
            "MultiWorkerMirroredStrategy and a loop by hand: stock Keras cannot fit there",
        ),
        "strategy()": (tfopt, _BY_HAND, "tfopt.distribute.strategy() and the same loop; goal: 0.98 of the speed"),
        "strategy(), fit": (tfopt, _FIT, "the same with model.fit"),
        "shard_optimizer": (tfopt, _SHARDED, "the same, each process with half of Adam's state"),
        _ALONE: (alone, _BY_HAND, "on one of the CPUs, with one worker's part of the batch"),
    }
    return Case(
        suite="distribute",
        workload=f"mlp, {_PROCESSES} processes",
        question="What does tfopt's layer add to a step of tf.distribute, and what does the second process gain?",
        unit="step",
        variants=[
            Variant(
                name=name,
                note=note,
                timer=partial(processes.timer, training, steps),
                values=partial(processes.weights, training),
                ceiling=name == _ALONE,
                gpus=0,
            )
            for name, (processes, training, note) in setups.items()
        ],
        judge=_same_weights,
        communication=partial(
            _communication_of_processes,
            tfopt,
            {name: each for name, (each, training, _) in setups.items() if training is _BY_HAND},
        ),
    )


def _local_steps_case(steps: int) -> Case:
    processes = _Processes("tfopt", _PROCESSES)
    setups = {
        "every step": (_FIT, "gradients are summed in each step"),
        "LocalSteps(8)": (_LOCAL, "weights are averaged every 8 steps: a different algorithm"),
    }
    return Case(
        suite="distribute",
        workload="mlp, local steps",
        question="What does skipping synchronisation save, and what does it do to the loss?",
        unit="step",
        variants=[
            Variant(
                name=name,
                note=note,
                timer=partial(processes.timer, training, steps),
                values=partial(processes.loss, training),
                gpus=0,
            )
            for name, (training, note) in setups.items()
        ],
        judge=_learns,
    )


def _input_case(steps: int) -> Case:
    return Case(
        suite="distribute",
        workload="input in processes",
        question="How does build_pipeline's speed scale with processes that each read a part?",
        unit="batch",
        variants=[
            Variant(
                name=f"{count} process{'es' * (count > 1)}",
                note=f"on {min(count, len(usable_cpus()))} of the CPUs",
                timer=partial(readers.reading, steps),
                values=readers.numbers,
                gpus=0,
            )
            for count in _READERS
            for readers in [_Processes("tfopt" if count > 1 else "none", count)]
        ],
        judge=same_values(f"each of {READ_EXAMPLES} examples once an epoch", "each once"),
    )


class _Processes:
    """Processes that train under one layer, as in `Job`; keeps what was measured in them after their end."""

    def __init__(self, layer: str, count: int):
        self._layer, self._count = layer, count
        self._group: Group | None = None
        self._weights: dict[str, Sequence[float]] = {}
        self._losses: dict[str, float] = {}
        self._numbers: Sequence[float] = ()
        self._first_step_seconds = 0.0
        self.start_to_first_step_seconds = 0.0
        self.gradient_bytes = 0
        self.sent_bytes: dict[str, float] = {}
        self.sharding: dict[str, float] | None = None
        self.reduction_ms: Mapping[int, float] = {}

    def timer(self, training: Mapping[str, Any], steps: int, stack: ExitStack) -> Timer:
        """Trains for the comparison of results, and returns what times `steps` steps."""
        group = self._group or self._start_training(stack)
        whole = {"batch_size": _GLOBAL_BATCH_SIZE, **training}
        by_hand = training["by_hand"]
        left = _CHECK_STEPS - 1 if by_hand else _CHECK_STEPS  # the first by hand was taken at the start
        before = sent_bytes()
        trained, *_ = group.ask("train", training=whole, steps=left)
        after = sent_bytes()
        if before is not None and after is not None:
            self.sent_bytes[str(training)] = (after - before) / left / self._count
        self.sharding = trained["sharding"] or self.sharding
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "weights.npy")
            group.ask("save", training=whole, path=str(path))
            self._weights[str(training)] = np.load(path)
        self._losses[str(training)] = group.ask("loss", training=whole)[0]["loss"]
        return partial(self._time, group, training, steps)

    def weights(self, training: Mapping[str, Any]) -> Sequence[float]:
        """Weights after the steps that `timer` has taken."""
        return self._weights[str(training)]

    def loss(self, training: Mapping[str, Any]) -> Sequence[float]:
        """The loss after them."""
        return [self._losses[str(training)]]

    def reading(self, steps: int, stack: ExitStack) -> Timer:
        """Reads an epoch for the comparison, and returns what times `steps` batches."""
        group = self._group = self._start(stack)
        answers = group.ask("numbers", batch_size=_READ_BATCH_SIZE)
        self._numbers = sorted(number for answer in answers for number in answer["numbers"])
        return partial(self._read, group, steps)

    def numbers(self) -> Sequence[float]:
        """The examples that all processes together have read in an epoch."""
        return self._numbers

    def _start(self, stack: ExitStack) -> Group:
        cpus = usable_cpus()
        jobs = [
            Job(self._layer, rank, cpus[rank % len(cpus)] if len(cpus) > 1 else None) for rank in range(self._count)
        ]
        group = stack.enter_context(Group(jobs))
        group.answers()
        return group

    def _start_training(self, stack: ExitStack) -> Group:
        self._group = group = self._start(stack)
        ready = time.monotonic()
        first, *_ = group.ask("train", training={"batch_size": _GLOBAL_BATCH_SIZE, **_BY_HAND}, steps=1)
        self._first_step_seconds = time.monotonic() - ready
        self.start_to_first_step_seconds = time.monotonic() - group.started
        self.gradient_bytes = first["gradient_bytes"]
        if self._count > 1:
            times, *_ = group.ask("reduce")
            self.reduction_ms = {int(size): StepTimes.from_dict(each).median_ms for size, each in times.items()}
        return group

    def _time(self, group: Group, training: Mapping[str, Any], steps: int) -> StepTimes:
        batch_size = _GLOBAL_BATCH_SIZE // _PROCESSES * self._count
        whole = {"batch_size": batch_size, **training}
        answer, *_ = group.ask("time", training=whole, steps=steps, warmup=2, samples=4)
        times = StepTimes.from_dict(answer)
        # fit sees one worker's part of the batch, and the timer's first step by hand was not the first.
        first = self._first_step_seconds if training["by_hand"] else times.first_step_seconds
        return replace(times, examples_per_step=batch_size, first_step_seconds=first)

    def _read(self, group: Group, steps: int) -> StepTimes:
        answers = group.ask("read", batch_size=_READ_BATCH_SIZE, steps=steps, warmup=4, samples=4)
        return max(map(StepTimes.from_dict, answers), key=lambda times: times.median_ms)  # all wait for the slowest


def _communication_of_processes(
    tfopt: _Processes, groups: Mapping[str, _Processes], times: Mapping[str, StepTimes]
) -> CommunicationResult:
    sharding = tfopt.sharding
    if sharding and str(_SHARDED) in tfopt.sent_bytes:
        sharding = sharding | {"measured_sent_bytes": tfopt.sent_bytes[str(_SHARDED)]}
    return CommunicationResult(
        replicas=_PROCESSES,
        sent_bytes_per_step=tfopt.sent_bytes.get(str(_BY_HAND)),
        model=RingModel.measured(
            compute_ms=times[_ALONE].median_ms,
            gradient_bytes=tfopt.gradient_bytes,
            replicas=_PROCESSES,
            reduction_ms=tfopt.reduction_ms,
        ),
        start_to_first_step_seconds={name: each.start_to_first_step_seconds for name, each in groups.items()},
        sharding=sharding,
    )


def devices_case(devices: Sequence[str], steps: int) -> Case:
    """All devices, by names such as "GPU:0", and one: each with the same batch, so that only the all-reduce differs."""
    strategies = {count: cache(partial(_mirrored, devices[:count])) for count in (len(devices), 1)}
    return Case(
        suite="distribute",
        workload=f"mlp, {len(devices)} devices",
        question="What do more devices gain, with the same batch on each?",
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


def _learns(expected: Sequence[float], values: Sequence[float]) -> Check:
    """Shows a loss, and judges only that the training learns: local steps are another training."""
    del expected
    return Check(
        what=f"loss after {_CHECK_STEPS} steps: below half of the {_GUESSING:.2f} of guessing, not compared",
        values=tuple(values),
        passed=values[0] < _GUESSING / 2,
        text=f"loss {values[0]:.3f}",
    )


if __name__ == "__main__":
    harness.run_cases(__doc__, cases)
