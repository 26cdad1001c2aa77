"""What tests of the throughput logger train, and the clock that they time it with."""

import json

import keras
import tensorflow as tf
from models import batch


class Clock:
    """One second for each step: it is read when an epoch begins and when a step ends."""

    def __init__(self, *seconds):
        self.now = 0.0
        self.seconds = list(seconds)

    def __call__(self):
        self.now += self.seconds.pop(0) if self.seconds else 1.0
        return self.now


def dataset(examples, size):
    return tf.data.Dataset.from_tensor_slices(batch(examples)).batch(size)


def tiny_net(base=keras.Sequential, **options):
    model = base([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def rows(folder):
    return [json.loads(line) for line in (folder / "throughput.jsonl").read_text().splitlines()]
