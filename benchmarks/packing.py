"""Tokens a second that `fit` trains a small decoder on: documents padded in the usual ways, bucketed, and packed.

    python benchmarks/packing.py [RESULTS.json] [--turns N] [--tiny]

Documents have log-normal lengths. Each way trains the same model on every token that has a next one, once an epoch, in
steps of about as many positions; its epochs are timed from the second on, in turn with the others'. The table shows
each way's median speed in times of padding all to the longest, with a 95 % interval, and the share of positions that
hold tokens.
"""

import argparse
import datetime
import json
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.files import write_atomic
from tfopt.measure import StepTimes, compare, environment
from tfopt.pipelines import build_pipeline, next_tokens, tokens

LENGTH, VOCABULARY, WIDTH, HEADS, LAYERS = 256, 1000, 128, 4, 2
ROWS = 16  # of LENGTH positions, in a step
BASELINE, PACKED = "padded to the longest", "pack"


def documents(count):
    """Token ids in documents of log-normal lengths, at most LENGTH; more than one each."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(50), 0.9, count).astype(int), 2, LENGTH)
    return [random.integers(1, VOCABULARY, length).tolist() for length in lengths]


def padded(texts, batch, length=None):
    """Batches by hand, shuffled, of documents padded to `length`, or to the longest of the batch."""
    rows = tf.data.Dataset.from_tensor_slices(tf.ragged.constant(texts, dtype=tf.int32))
    rows = rows.shuffle(len(texts)).map(lambda row: row).padded_batch(batch, padded_shapes=[length])

    def example(ids):
        held = tf.cast(ids > 0, tf.int32)
        labels = tf.pad(ids[:, 1:], ((0, 0), (0, 1)))
        positions = tf.broadcast_to(tf.range(tf.shape(ids)[1]), tf.shape(ids))
        return {"tokens": ids, "segments": held, "positions": positions}, labels, tf.cast(labels > 0, tf.float32)

    return rows.map(example, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)


def ours(texts, batch, **options):
    """The pipeline of documents that are padded by tfopt, as the model takes them."""
    return build_pipeline(tokens(texts), transform=next_tokens, batch_size=batch, remainder="keep", seed=0, **options)


def ways(texts):
    """The batches of each way, by name."""
    mean = np.mean([len(text) for text in texts])
    more = int(ROWS * LENGTH / mean / 2)  # documents, such that a batch has about as many positions
    return {
        BASELINE: padded(texts, ROWS, LENGTH),
        "padded to the batch's longest": padded(texts, more),
        'pad="batch"': ours(texts, more, pad="batch"),
        "bucket=True": ours(texts, more, bucket=True),
        PACKED: build_pipeline(tokens(texts), pack=LENGTH, batch_size=ROWS, remainder="keep", seed=0),
    }


def decoder():
    """A model of the tokens that follow."""
    keras.utils.set_random_seed(0)
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in ("tokens", "segments", "positions")}
    embed = keras.layers.Embedding
    hidden = embed(VOCABULARY, WIDTH)(inputs["tokens"]) + embed(LENGTH, WIDTH)(inputs["positions"])
    mask = tfopt.kernels.segment_mask(inputs["segments"])
    for _ in range(LAYERS):
        normed = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(normed, normed, attention_mask=mask)
        normed = keras.layers.LayerNormalization()(hidden)
        hidden += keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(normed))
    model = keras.Model(inputs, keras.layers.Dense(VOCABULARY)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=False)  # as shapes that change need
    return model


def contents(dataset):
    """What an epoch holds: tokens that have a next one, and positions."""
    trained = positions = 0
    for _, labels, weights in dataset:
        trained += int(np.sum(weights))
        positions += int(np.size(labels))
    return trained, positions


def measure(texts, turns):
    """Trains each way in turn; returns what is reported of each."""
    expected = sum(len(text) - 1 for text in texts)
    arms = {name: (decoder(), dataset) for name, dataset in ways(texts).items()}
    found, epochs = {}, {name: [] for name in arms}
    for name, (_, dataset) in arms.items():
        trained, positions = contents(dataset)
        if trained != expected:
            raise AssertionError(f"{name}: {trained:,} tokens in place of {expected:,}")
        found[name] = {"tokens": trained, "positions": positions}
    for turn in range(turns + 1):
        for name, (model, dataset) in arms.items():
            start = time.perf_counter()
            model.fit(dataset, epochs=1, verbose=0, shuffle=False)  # the datasets do
            if turn:  # the first one is traced
                epochs[name].append(1e3 * (time.perf_counter() - start))
    times = {
        name: StepTimes(repeats_ms=tuple((ms,) for ms in each), steps_per_sample=1, first_step_seconds=0.0)
        for name, each in epochs.items()
    }
    for name, each in epochs.items():
        against = compare(times[BASELINE], times[name])
        found[name] |= {
            "epoch_ms": each,
            "tokens_per_second": 1e3 * found[name]["tokens"] / float(np.median(each)),
            "speed": against.ratio,
            "interval": list(against.interval),
        }
    return found


def main():
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", metavar="RESULTS.json", help="where to write")
    parser.add_argument(
        "--turns", type=int, default=7, metavar="N", help="epochs of each way that are timed; default 7"
    )
    parser.add_argument("--tiny", action="store_true", help="few documents and two turns, to see whether it runs")
    options = parser.parse_args()
    texts = documents(60 if options.tiny else 800)
    figures = measure(texts, 2 if options.tiny else options.turns)
    for name, one in figures.items():
        low, high = one["interval"]
        print(
            f"{name:30} {one['tokens_per_second']:9,.0f} tokens/s, {one['speed']:.2f}× [{low:.2f}–{high:.2f}], "
            f"{one['tokens'] / one['positions']:.0%} of positions used"
        )
    if options.results:
        document = {
            "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "environment": environment(),
            "documents": len(texts),
            "length": LENGTH,
            "figures": figures,
        }
        write_atomic(Path(options.results), json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
