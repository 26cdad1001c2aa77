"""Processes on this machine that train together, and do each turn when they are told."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO, Any, Self

from tfopt.bench.worker import ANSWER_BYTES, Job
from tfopt.distribute.launch.workers import local_cluster
from tfopt.distribute.watchdog.channel import Channel, readable
from tfopt.errors import TfoptError

_ANSWER_SECONDS = 300.0  # compilations on a busy machine included
_TAIL_CHARACTERS = 2000


class Group:
    """Starts a process for each job; several are a cluster. Used as a context manager, it ends them.

    Args:
        jobs: In the order of the ranks.

    Attributes:
        started: By the monotonic clock in seconds, when the first was about to be started.
    """

    def __init__(self, jobs: Sequence[Job]):
        self._stack = contextlib.ExitStack()
        self._workers: list[tuple[subprocess.Popen[bytes], Channel, IO[bytes]]] = []
        self.started = time.monotonic()
        configs = self._stack.enter_context(local_cluster(len(jobs)))
        try:
            for job, config in zip(jobs, configs, strict=True):
                self._start(job, config if len(jobs) > 1 else "")  # an empty one counts as none
        except BaseException:
            self._end()
            raise

    def ask(self, call: str, **arguments: Any) -> list[dict[str, Any]]:
        """Has all of them call a method of `tfopt.bench.worker.Worker`, at once, and waits for the answers.

        Args:
            call: The method's name.
            arguments: What it is called with, as JSON values.

        Returns:
            What each answers, in the order of the ranks.

        Raises:
            TfoptError: One ended, or did not answer in time. The end of what it wrote stands in the text.

        Example:
            >>> with Group([job, job]) as group:
            ...     group.answers()  # they have started
            ...     first, second = group.ask("train", batch_size=64, by_hand=True, steps=10)
        """
        for _, channel, _ in self._workers:
            channel.send(call=call, arguments=arguments)
        return self.answers(call)

    def answers(self, call: str = "start") -> list[dict[str, Any]]:
        """Waits for an answer of each, as after the start, which nobody asked for.

        Args:
            call: What was asked, for the error.

        Returns:
            What each answers, in the order of the ranks.

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
        output = tempfile.TemporaryFile()  # noqa: SIM115  closed at the end, with the others
        self._stack.callback(output.close)
        # Without GPUs: NCCL does not let two processes share one.
        environ = os.environ | {"TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1"}
        with theirs:
            process = subprocess.Popen(job.command(), stdin=theirs.fileno(), stdout=output, stderr=output, env=environ)
        self._workers.append((process, Channel(ours, line_bytes=ANSWER_BYTES), output))

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
