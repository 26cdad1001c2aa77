"""Prints the bytes that XLA assigns to what a step of a transformer computes: as Keras trains it, and recomputed.

It reads them from the folder into which XLA_FLAGS lets XLA dump its programs.
"""

import re
import sys
from pathlib import Path

import keras
import recomputed_nets as nets
import tensorflow as tf

from tfopt.memory import recompute

FOLDER = Path(sys.argv[1])
COUNT, LENGTH, SIZE = 4, 64, 32


def transformer():
    inputs = keras.Input((LENGTH,), dtype="int32", batch_size=8)
    outputs = nets.layers.Embedding(20, SIZE)(inputs)
    for _ in range(COUNT):
        outputs = nets.Block(SIZE)(outputs)
    return keras.Model(inputs, nets.layers.Dense(20, activation="softmax")(outputs))


def temporary_bytes():
    """The largest buffer for temporary values since the last call."""
    found = []
    for file in FOLDER.glob("*buffer-assignment.txt"):
        found += map(int, re.findall(r"size (\d+), preallocated-temp", file.read_text()))
        file.unlink()
    return max(found)


model = nets.made(transformer, jit_compile=True)
ids = tf.random.uniform((8, LENGTH), 1, 20, tf.int32)
for again in (False, True):
    if again:
        assert recompute(model) == COUNT
    model.train_on_batch(ids, ids)
    print(temporary_bytes())
