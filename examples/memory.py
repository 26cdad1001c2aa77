"""Fits a model into less memory: what a step takes, the same training in less, and which batch size is the fastest.

Run it as it is: `python examples/memory.py`. It takes a minute on two cores.
"""

import keras
import numpy as np

import tfopt

EXAMPLES, LENGTH, WORDS, WIDTH = 512, 64, 2_000, 64


def language_model():
    """Four blocks of a transformer that predict the next word."""
    layers = keras.layers
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(ids)
    for _ in range(4):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, WIDTH // 4)(x, x, use_causal_mask=True))
        x = layers.LayerNormalization()(x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(x)))
    model = keras.Model(ids, layers.Dense(WORDS)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
    return model


words = np.random.default_rng(0).integers(WORDS, size=(EXAMPLES, LENGTH + 1))
x, y = words[:, :-1], words[:, 1:]
model = language_model()

# What does a step take? Nothing runs.
estimate = tfopt.memory.estimate(model, (x[:64], y[:64]))
print(estimate)

# Which batch is the fastest, within a limit? The model stays as it is.
search = tfopt.batch.find(model, (x, y), largest=64, limit_mib=estimate.total_mib / 2)
print(search)

# The same training in less memory: first what costs little time, in its place what saves more.
tfopt.memory.recompute(model, "activations")
cheap = tfopt.memory.estimate(model, (x[:64], y[:64]))
tfopt.memory.recompute(model)
tfopt.kernels.chunk_cross_entropy(model, chunks=4)
less = tfopt.memory.estimate(model, (x[:64], y[:64]))
print(
    f"A step on 64 examples takes {cheap.total_mib:.0f} MiB with its activations recomputed, and {less.total_mib:.0f} "
    f"with whole blocks recomputed and the loss in pieces, instead of {estimate.total_mib:.0f}."
)

# Updates as with batches of 64, from batches of 16.
tfopt.batch.accumulate(model, 4)
with tfopt.memory.explained_errors(model):  # says what would help if the memory does not suffice
    model.fit(x, y, batch_size=16, epochs=1, verbose=2)
print(f"updates: {int(model.optimizer.iterations)}, from {EXAMPLES // 16} batches")
