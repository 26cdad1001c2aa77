"""One process of those that the suite `distribute` trains in: it does as it is told, and answers in messages."""

import json
import os
import socket
import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from tfopt.distribute.watchdog.channel import Channel, readable

ANSWER_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is.

    Attributes:
        layer: "none": no strategy; "tensorflow": its MultiWorkerMirroredStrategy; "tfopt": `tfopt.distribute.strategy`.
        rank: Among the processes that train together.
        cpu: The one that it runs on. None: all that it may use.
    """

    layer: str
    rank: int
    cpu: int | None

    def command(self) -> list[str]:
        """Starts a worker. A socket is its standard input."""
        return [sys.executable, "-m", "tfopt.bench.worker", json.dumps(asdict(self))]


class Worker:
    """The trainings in this process.

    Args:
        job: What it is.
    """

    def __init__(self, job: Job):
        self._rank = job.rank
        # Before TensorFlow is loaded: it sizes its threads by the CPUs that it may use.
        if job.cpu is not None:
            os.sched_setaffinity(0, {job.cpu})
        self._strategy = _strategy(job.layer)
        from tfopt.bench.replicas import Training

        # By batch size and by whether the loop is by hand; each is made once.
        self._training = cache(lambda batch_size, by_hand: Training(self._strategy, batch_size, by_hand=by_hand))

    def train(self, batch_size: int, by_hand: bool, steps: int) -> dict[str, Any]:
        """Takes steps, and tells how large all gradients are."""
        training = self._training(batch_size, by_hand)
        training.train(steps)
        return {"gradient_bytes": training.gradient_bytes}

    def save(self, batch_size: int, by_hand: bool, path: str) -> dict[str, Any]:
        """Writes the weights to a file (.npy). Only the first worker does."""
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
        from tfopt.bench.replicas import reduction_times

        return {str(size): times.to_dict() for size, times in reduction_times(self._strategy).items()}


def _strategy(layer: str) -> Any:
    if layer == "tfopt":
        from tfopt import distribute

        return distribute.strategy("multi_worker")
    import tensorflow as tf

    return tf.distribute.MultiWorkerMirroredStrategy() if layer == "tensorflow" else tf.distribute.get_strategy()


def main() -> None:
    """Does what it is told until nobody tells it any more."""
    channel = Channel(socket.socket(fileno=0), line_bytes=ANSWER_BYTES)
    worker = Worker(Job(**json.loads(sys.argv[1])))
    channel.send(answer={})
    while not channel.closed:
        readable([channel], 1.0)
        for message in channel.receive():
            channel.send(answer=getattr(worker, message["call"])(**message["arguments"]))


if __name__ == "__main__":
    main()
