"""Replicas that train together: in this process under any strategy, or in processes that take turns when asked to."""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import keras
import numpy as np
import tensorflow as tf

from tfopt import distribute
from tfopt.bench.cases import DrawTimer
from tfopt.bench.workloads import digits
from tfopt.callbacks import LocalSteps
from tfopt.distribute.local_workers import local_cluster
from tfopt.errors import TfoptError
from tfopt.measure import FitTimer, StepTimes
from tfopt.pipelines import build_pipeline
from tfopt.processes import Child

WIDTH = 512
REDUCED_BYTES = (0, 4, 2**22)
"""Sizes of the tensors reduced: 0 for the call alone, a small one for the latency, a large one for the bandwidth."""

READ_EXAMPLES = 1024
"""Examples of an epoch of `Input`."""

_BATCHES = 16
_REDUCTIONS = 40
_ANSWER_SECONDS = 300.0  # compilations on a busy machine included


class Training:
    """A perceptron under a strategy, fed with digits that lie in memory.

    Args:
        strategy: Strategy it trains under.
        batch_size: Global batch size.
        by_hand: Whether its steps are a custom loop, as in tf.distribute's guide; else Keras' fit.
        sharded: Whether the replicas divide the optimizer's state among them.
        local_steps: After how many steps of `fit` the replicas average their weights, instead of summing gradients.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        batch_size: int,
        *,
        by_hand: bool,
        sharded: bool = False,
        local_steps: int | None = None,
    ):
        keras.utils.set_random_seed(0)
        self._strategy, self._batch_size = strategy, batch_size
        self._callbacks = [] if local_steps is None else [LocalSteps(local_steps)]
        with strategy.scope():
            self.net = digits.perceptron(width=WIDTH, jit_compile=False)
            if sharded:
                distribute.shard_optimizer(self.net.optimizer)
            self.net.optimizer.build(self.net.trainable_variables)
        images, labels = digits.perceptron_batch(_BATCHES * batch_size)
        batches = tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch_size, drop_remainder=True)
        self._dataset = batches.repeat()
        self._done = 0
        self._step = self._loop() if by_hand else None

    def train(self, steps: int) -> None:
        """Takes training steps. Each call goes on with the next batch."""
        if self._step is None:
            batches = self._dataset.skip(self._done)
            self.net.fit(batches, steps_per_epoch=steps, verbose=0, shuffle=False, callbacks=self._callbacks)
            self._done += steps
        else:
            for _ in range(steps):
                self._step()

    @cached_property
    def timer(self) -> Any:
        """Times steps: called with `steps`, `warmup` and `samples`, it returns StepTimes."""
        step = self._step
        if step is None:
            return FitTimer(self.net, self._dataset, callbacks=self._callbacks)
        return DrawTimer(lambda: [step()], self._batch_size)

    def weights(self) -> Any:
        """All weights, shape (weights,), float32."""
        return np.concatenate([np.ravel(weight) for weight in self.net.get_weights()])

    def loss(self) -> float:
        """The mean loss over the digits that it trains on."""
        images, labels = digits.perceptron_batch(_BATCHES * self._batch_size)
        value = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, self.net(images))
        return float(value)

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


class Input:
    """A pipeline of images that are enlarged on the CPU, of which each worker reads its part.

    Args:
        batch_size: Global batch size.
    """

    def __init__(self, batch_size: int):
        numbered = (digits.batch(READ_EXAMPLES)[0], np.arange(READ_EXAMPLES))
        self._dataset = build_pipeline(numbered, batch_size=batch_size, transform=_enlarge, cache=None, seed=0)
        self.timer: Any = DrawTimer(lambda: iter(self._dataset), batch_size)

    def numbers(self) -> list[int]:
        """The examples that this worker reads in an epoch."""
        local = tf.distribute.get_strategy().experimental_local_results
        return [int(one) for _, numbers in self._dataset for part in local(numbers) for one in np.ravel(part)]


def _enlarge(image: Any, number: Any) -> tuple[Any, Any]:
    large = tf.image.resize(image, (512, 512), "bicubic")
    return tf.image.resize(large, (64, 64), "area"), number


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


class Group:
    """Starts a process for each job; several are a cluster. As a context manager, it ends them.

    Args:
        jobs: In the order of the ranks.
    """

    def __init__(self, jobs: Sequence[Job]):
        self._workers: list[Child] = []
        self.started = time.monotonic()  # when the first was about to be
        with contextlib.ExitStack() as stack:
            configs = stack.enter_context(local_cluster(len(jobs)))
            for job, config in zip(jobs, configs, strict=True):
                # An empty TF_CONFIG counts as none. Without GPUs: NCCL does not let two processes share one.
                own = {"TF_CONFIG": config if len(jobs) > 1 else "", "CUDA_VISIBLE_DEVICES": "-1"}
                worker = stack.enter_context(Child(work, os.environ | own))
                worker.connection.send(asdict(job))
                self._workers.append(worker)
            self._stack = stack.pop_all()

    def ask(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all workers call a method of `Worker` at once, and returns their answers in the order of the ranks.

        Args:
            call: The method's name.
            arguments: Its arguments.

        Raises:
            TfoptError: If a worker ended, or did not answer in time. The message quotes the end of its output.

        Example:
            >>> with Group([job, job]) as group:
            ...     group.answers()  # they have started
            ...     first, second = group.ask("train", batch_size=64, by_hand=True, steps=10)
        """
        for worker in self._workers:
            with contextlib.suppress(OSError):  # one that has ended does not answer
                worker.connection.send((call, arguments))
        return self.answers(call)

    def answers(self, call: str = "start") -> list[dict[str, Any]]:
        """As `ask`, of what was asked already; without a call, of the workers' start."""
        left = {worker.connection: rank for rank, worker in enumerate(self._workers)}
        answers: dict[int, dict[str, Any]] = {}
        due = time.monotonic() + _ANSWER_SECONDS
        while left:
            ready = wait(left, due - time.monotonic())
            if not ready:
                raise self._error(min(left.values()), call, "did not")
            for connection in left.keys() & ready:
                rank = left.pop(connection)
                try:
                    answers[rank] = connection.recv()
                except (EOFError, OSError):
                    raise self._error(rank, call, "ended") from None
        return [answers[rank] for rank in range(len(answers))]

    def _error(self, rank: int, call: str, found: str) -> TfoptError:
        return TfoptError(
            f"Expected worker {rank} to answer to {call!r} within {_ANSWER_SECONDS:g} s. Found that it {found}. What "
            f"to do: see its output: {self._workers[rank].last_words()}"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class Worker:
    """The trainings in this process."""

    def __init__(self, job: Job):
        self._rank = job.rank
        # Before TensorFlow starts its threads, whose number follows from the CPUs it may use.
        if job.cpu is not None:
            os.sched_setaffinity(0, {job.cpu})
        self._strategy = _strategy(job.layer)
        self._training = cache(partial(Training, self._strategy))  # each is made once
        self._input = cache(Input)

    def train(self, training: dict[str, Any], steps: int) -> dict[str, Any]:
        """Takes steps of a training, given by its arguments, and answers how large its gradients and its state are."""
        found = self._training(**training)
        found.train(steps)
        sharding = getattr(found.net.optimizer, "sharding", None)
        return {"gradient_bytes": found.gradient_bytes, "sharding": sharding and sharding.to_dict()}

    def save(self, training: dict[str, Any], path: str) -> dict[str, Any]:
        """Writes the weights to a file (.npy). Only the first worker does so."""
        if self._rank == 0:
            np.save(path, self._training(**training).weights())
        return {}

    def loss(self, training: dict[str, Any]) -> dict[str, Any]:
        """Answers the loss."""
        return {"loss": self._training(**training).loss()}

    def time(self, training: dict[str, Any], **times: int) -> dict[str, Any]:
        """Times steps."""
        measured: dict[str, Any] = self._training(**training).timer(**times).to_dict()
        return measured

    def read(self, batch_size: int, **times: int) -> dict[str, Any]:
        """Times how long a global batch takes of which each worker reads its part."""
        with self._strategy.scope():
            measured: dict[str, Any] = self._input(batch_size).timer(**times).to_dict()
        return measured

    def numbers(self, batch_size: int) -> dict[str, Any]:
        """Answers which examples this worker reads in an epoch."""
        with self._strategy.scope():
            return {"numbers": self._input(batch_size).numbers()}

    def reduce(self) -> dict[str, Any]:
        """Times the all-reduce."""
        return {str(size): times.to_dict() for size, times in reduction_times(self._strategy).items()}


def _strategy(layer: str) -> Any:
    if layer == "tfopt":
        return distribute.strategy("multi_worker")
    return tf.distribute.MultiWorkerMirroredStrategy() if layer == "tensorflow" else tf.distribute.get_strategy()


def work(connection: "Connection[Any, Any]") -> None:
    """What a worker does: it answers messages until the other end closes."""
    with contextlib.suppress(EOFError):
        worker = Worker(Job(**connection.recv()))
        connection.send({})
        while True:
            call, arguments = connection.recv()
            connection.send(getattr(worker, call)(**arguments))
