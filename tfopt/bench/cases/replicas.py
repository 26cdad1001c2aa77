"""Replicas that train together: in this process under any strategy, or in processes that take each turn when asked to.

Run as a module, this is one such process: it does what the messages on its standard input ask for, and answers.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from types import TracebackType
from typing import IO, Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfopt import distribute
from tfopt.bench.cases import DrawTimer
from tfopt.bench.workloads import digits
from tfopt.distribute.local_workers import local_cluster
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.errors import TfoptError
from tfopt.measure import FitTimer, StepTimes

WIDTH = 512
REDUCED_BYTES = (0, 4, 2**22)
"""Sizes of the tensors reduced: 0 for the call alone, a small one for the latency, a large one for the bandwidth."""

_BATCHES = 16
_REDUCTIONS = 40
_ANSWER_SECONDS = 300.0  # compilations on a busy machine included
_ANSWER_BYTES = 1 << 16
_TAIL_CHARACTERS = 2000


class Training:
    """A perceptron under a strategy, fed with digits that lie in memory.

    Args:
        strategy: Strategy it trains under.
        batch_size: Global batch size.
        by_hand: Whether its steps are a custom loop, as in tf.distribute's guide; else Keras' fit.
    """

    def __init__(self, strategy: tf.distribute.Strategy, batch_size: int, *, by_hand: bool):
        keras.utils.set_random_seed(0)
        self._strategy, self._batch_size = strategy, batch_size
        with strategy.scope():
            self.net = digits.perceptron(width=WIDTH, jit_compile=False)
            self.net.optimizer.build(self.net.trainable_variables)
        images, labels = digits.perceptron_batch(_BATCHES * batch_size)
        batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
        self._dataset = batches.repeat()
        self._done = 0
        self._step = self._loop() if by_hand else None

    def train(self, steps: int) -> None:
        """Takes training steps. Each call goes on with the next batch."""
        if self._step is None:
            self.net.fit(self._dataset.skip(self._done), steps_per_epoch=steps, verbose=0, shuffle=False)
            self._done += steps
        else:
            for _ in range(steps):
                self._step()

    @cached_property
    def timer(self) -> Any:
        """Times steps: called with `steps`, `warmup` and `samples`, it returns StepTimes."""
        step = self._step
        if step is None:
            return FitTimer(self.net, self._dataset)
        return DrawTimer(lambda: [step()], self._batch_size)

    def weights(self) -> Any:
        """All weights, shape (weights,), float32."""
        return np.concatenate([np.ravel(weight) for weight in self.net.get_weights()])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(weight.nbytes for weight in self.net.get_weights())

    def _loop(self) -> Callable[[], Any]:
        """Returns a function that takes a step."""
        net, batch_size = self.net, self._batch_size
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

        def step(images: Any, labels: Any) -> None:
            with tf.GradientTape() as tape:
                value = loss(labels, net(images, training=True)) / batch_size
            net.optimizer.apply(tape.gradient(value, net.trainable_variables), net.trainable_variables)

        train = tf.function(lambda *batch: self._strategy.run(step, args=batch), autograph=False)
        batches = iter(self._strategy.experimental_distribute_dataset(self._dataset))
        return lambda: train(*next(batches))


def reduction_times(strategy: tf.distribute.Strategy) -> dict[int, StepTimes]:
    """Times the all-reduce of a tensor, by its size in bytes; under 0 the call alone. All workers have to call it."""
    return {size: _reduction_timer(strategy, size)(_REDUCTIONS, warmup=3, samples=10) for size in REDUCED_BYTES}


def _reduction_timer(strategy: tf.distribute.Strategy, size: int) -> DrawTimer:
    values = tf.ones((max(1, size // 4),))

    def reduce() -> Any:
        total = tf.distribute.get_replica_context().all_reduce("sum", values) if size else values
        return total[0]  # only one number back to Python

    reduced = tf.function(partial(strategy.run, reduce), autograph=False)
    return DrawTimer(lambda: [reduced()], 1)


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a worker."""

    layer: str  # "none": no strategy; "tensorflow": MultiWorkerMirroredStrategy; "tfopt": `tfopt.distribute.strategy`
    rank: int  # among the processes that train together
    cpu: int | None  # the one it runs on; None: all that it may use

    def command(self) -> list[str]:
        """Command that starts a worker, whose standard input is a socket."""
        return [sys.executable, "-m", "tfopt.bench.cases.replicas", json.dumps(asdict(self))]


class Group:
    """Starts a process for each job; several are a cluster. As a context manager, it ends them.

    Args:
        jobs: In the order of the ranks.
    """

    def __init__(self, jobs: Sequence[Job]):
        self._workers: list[tuple[Channel, IO[bytes]]] = []
        self.started = time.monotonic()  # when the first was about to be
        with contextlib.ExitStack() as stack:
            configs = stack.enter_context(local_cluster(len(jobs)))
            for job, config in zip(jobs, configs, strict=True):
                self._start(job, config if len(jobs) > 1 else "", stack)  # an empty one counts as none
            self._stack = stack.pop_all()

    def ask(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all workers call a method of `Worker` at once, and returns their answers in the order of the ranks.

        Args:
            call: The method's name.
            arguments: Its arguments, as JSON values.

        Raises:
            TfoptError: If a worker ended, or did not answer in time. The message quotes the end of its output.

        Example:
            >>> with Group([job, job]) as group:
            ...     group.answers()  # they have started
            ...     first, second = group.ask("train", batch_size=64, by_hand=True, steps=10)
        """
        for channel, _ in self._workers:
            channel.send(call=call, arguments=arguments)
        return self.answers(call)

    def answers(self, call: str = "start") -> list[dict[str, Any]]:
        """As `ask`, of what was asked already; without a call, of the workers' start."""
        answers: dict[int, dict[str, Any]] = {}
        due = time.monotonic() + _ANSWER_SECONDS
        while len(answers) < len(self._workers):
            readable([channel for channel, _ in self._workers], 1.0)
            for rank, (channel, output) in enumerate(self._workers):
                for message in channel.receive():
                    answers[rank] = message["answer"]
                if rank not in answers and (channel.closed or time.monotonic() > due):
                    raise TfoptError(
                        f"Expected worker {rank} to answer to {call!r} within {_ANSWER_SECONDS:g} s. Found that "
                        f"it {'ended' if channel.closed else 'did not'}. What to do: see its output: {_tail(output)}"
                    )
        return [answers[rank] for rank in range(len(answers))]

    def _start(self, job: Job, config: str, stack: contextlib.ExitStack) -> None:
        ours, theirs = socket.socketpair()
        output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  it is closed with the stack
        # Without GPUs: NCCL does not let two processes share one.
        environ = os.environ | {"TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        with theirs:
            process = subprocess.Popen(job.command(), stdin=theirs.fileno(), stdout=output, stderr=output, env=environ)
        stack.callback(process.wait)
        stack.callback(process.kill)  # nothing of theirs is lost, and TensorFlow may take a quarter of a minute to end
        channel = Channel(ours, line_bytes=_ANSWER_BYTES)
        stack.callback(channel.close)
        self._workers.append((channel, output))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace").strip()[-_TAIL_CHARACTERS:]


class Worker:
    """The trainings in this process."""

    def __init__(self, job: Job):
        self._rank = job.rank
        # Before TensorFlow starts its threads, whose number follows from the CPUs it may use.
        if job.cpu is not None:
            os.sched_setaffinity(0, {job.cpu})
        self._strategy = _strategy(job.layer)
        # By batch size and by whether the loop is by hand; each is made once.
        self._training = cache(lambda batch_size, by_hand: Training(self._strategy, batch_size, by_hand=by_hand))

    def train(self, batch_size: int, by_hand: bool, steps: int) -> dict[str, Any]:
        """Takes steps, and answers how large all gradients are."""
        training = self._training(batch_size, by_hand)
        training.train(steps)
        return {"gradient_bytes": training.gradient_bytes}

    def save(self, batch_size: int, by_hand: bool, path: str) -> dict[str, Any]:
        """Writes the weights to a file (.npy). Only the first worker does so."""
        if self._rank == 0:
            np.save(path, self._training(batch_size, by_hand).weights())
        return {}

    def time(self, batch_size: int, by_hand: bool, **times: int) -> dict[str, Any]:
        """Times steps."""
        measured: dict[str, Any] = self._training(batch_size, by_hand).timer(**times).to_dict()
        return measured

    def reduce(self) -> dict[str, Any]:
        """Times the all-reduce."""
        return {str(size): times.to_dict() for size, times in reduction_times(self._strategy).items()}


def _strategy(layer: str) -> Any:
    if layer == "tfopt":
        return distribute.strategy("multi_worker")
    return tf.distribute.MultiWorkerMirroredStrategy() if layer == "tensorflow" else tf.distribute.get_strategy()


def main() -> None:
    """Answers messages until the other end closes."""
    channel = Channel(socket.socket(fileno=0), line_bytes=_ANSWER_BYTES)
    worker = Worker(Job(**json.loads(sys.argv[1])))
    channel.send(answer={})
    while not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            channel.send(answer=getattr(worker, message["call"])(**message["arguments"]))


if __name__ == "__main__":
    main()
