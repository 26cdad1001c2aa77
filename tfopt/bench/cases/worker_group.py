"""Processes on this machine that train together, and take each turn when they are asked to.

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import TracebackType
from typing import IO, Any, Self

from tfopt.distribute.local_workers import local_cluster
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.errors import TfoptError

_ANSWER_SECONDS = 300.0  # compilations on a busy machine included
_ANSWER_BYTES = 1 << 16
_TAIL_CHARACTERS = 2000


@dataclass(frozen=True, slots=True)
class Job:
    """Describes a worker."""

    layer: str  # "none": no strategy; "tensorflow": MultiWorkerMirroredStrategy; "tfopt": `tfopt.distribute.strategy`
    rank: int  # among the processes that train together
    cpu: int | None  # the one it runs on; None: all that it may use

    def command(self) -> list[str]:
        """Command that starts a worker, whose standard input is a socket."""
        return [sys.executable, "-m", "tfopt.bench.cases.worker_group", json.dumps(asdict(self))]


class Group:
    """Starts a process for each job; several are a cluster. As a context manager, it ends them.

    Args:
        jobs: In the order of the ranks.
    """

    def __init__(self, jobs: Sequence[Job]):
        self._stack = contextlib.ExitStack()
        self._workers: list[tuple[subprocess.Popen[bytes], Channel, IO[bytes]]] = []
        self.started = time.monotonic()  # when the first was about to be
        configs = self._stack.enter_context(local_cluster(len(jobs)))
        try:
            for job, config in zip(jobs, configs, strict=True):
                self._start(job, config if len(jobs) > 1 else "")  # an empty one counts as none
        except BaseException:
            self._end()
            raise

    def ask(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all workers call a method of `Worker` at once, and waits for the answers.

        Args:
            call: The method's name.
            arguments: Its arguments, as JSON values.

        Returns:
            The answers, in the order of the ranks.

        Raises:
            TfoptError: If a worker ended, or did not answer in time. The message quotes the end of its output.

        Example:
            >>> with Group([job, job]) as group:
            ...     group.answers()  # they have started
            ...     first, second = group.ask("train", batch_size=64, by_hand=True, steps=10)
        """
        for _, channel, _ in self._workers:
            channel.send(call=call, arguments=arguments)
        return self.answers(call)

    def answers(self, call: str = "start") -> list[dict[str, Any]]:
        """Waits for an answer of each worker; without a call, for the one that it gives when it has started.

        Args:
            call: What was asked, for the error.

        Returns:
            The answers, in the order of the ranks.

        Raises:
            TfoptError: As from `ask`.
        """
        answers: dict[int, dict[str, Any]] = {}
        due = time.monotonic() + _ANSWER_SECONDS
        while len(answers) < len(self._workers):
            readable([channel for _, channel, _ in self._workers], 1.0)
            for rank, (_, channel, output) in enumerate(self._workers):
                for message in channel.receive():
                    answers[rank] = message["answer"]
                if rank not in answers and (channel.closed or time.monotonic() > due):
                    raise TfoptError(
                        f"Expected worker {rank} to answer to {call!r} within {_ANSWER_SECONDS:g} s. Found that "
                        f"it {'ended' if channel.closed else 'did not'}. What to do: see its output: {_tail(output)}"
                    )
        return [answers[rank] for rank in range(len(answers))]

    def _start(self, job: Job, config: str) -> None:
        ours, theirs = socket.socketpair()
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed with the others
        self._stack.callback(output.close)
        # Without GPUs: NCCL does not let two processes share one.
        environ = os.environ | {"TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        with theirs:
            process = subprocess.Popen(job.command(), stdin=theirs.fileno(), stdout=output, stderr=output, env=environ)
        self._workers.append((process, Channel(ours, line_bytes=_ANSWER_BYTES), output))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def _end(self) -> None:
        for process, channel, _ in self._workers:
            channel.close()
            process.kill()  # nothing of theirs is lost, and TensorFlow may take a quarter of a minute to end
            process.wait()
        self._stack.close()


def _tail(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode(errors="replace").strip()[-_TAIL_CHARACTERS:]


class Worker:
    """The trainings in this process."""

    def __init__(self, job: Job):
        self._rank = job.rank
        # Before TensorFlow is loaded: it sizes its threads by the CPUs that it may use.
        if job.cpu is not None:
            os.sched_setaffinity(0, {job.cpu})
        self._strategy = _strategy(job.layer)
        from tfopt.bench.cases.replicas import Training

        # By batch size and by whether the loop is by hand; each is made once.
        self._training = cache(lambda batch_size, by_hand: Training(self._strategy, batch_size, by_hand=by_hand))

    def train(self, batch_size: int, by_hand: bool, steps: int) -> dict[str, Any]:
        """Takes steps, and answers how large all gradients are."""
        training = self._training(batch_size, by_hand)
        training.train(steps)
        return {"gradient_bytes": training.gradient_bytes}

    def save(self, batch_size: int, by_hand: bool, path: str) -> dict[str, Any]:
        """Writes the weights to a file (.npy). Only the first worker does so."""
        import numpy as np

        if self._rank == 0:
            np.save(path, self._training(batch_size, by_hand).weights())
        return {}

    def time(self, batch_size: int, by_hand: bool, **times: int) -> dict[str, Any]:
        """Times steps."""
        measured: dict[str, Any] = self._training(batch_size, by_hand).timer(**times).to_dict()
        return measured

    def reduce(self) -> dict[str, Any]:
        """Times the all-reduce."""
        from tfopt.bench.cases.replicas import reduction_times

        return {str(size): times.to_dict() for size, times in reduction_times(self._strategy).items()}


def _strategy(layer: str) -> Any:
    if layer == "tfopt":
        from tfopt import distribute

        return distribute.strategy("multi_worker")
    import tensorflow as tf

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
