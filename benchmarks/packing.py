"""Tokens a second on which `fit` trains a small decoder: documents padded in the usual ways, bucketed, and packed.

    pip install '.[bench]' -r benchmarks/peers/requirements.txt
    python benchmarks/packing.py [RESULTS.json] [--turns N] [--tiny]

Documents have log-normal lengths. Each way trains the same model on every token that has a next one, once an epoch, in
steps of about as many positions; its epochs are timed from the second on, in turn with the others'. The table shows
each way's median speed as a multiple of the speed of padding all to the longest, with a 95 % interval, and the share of
positions that hold tokens. A second table has the batches alone, packed by tfopt and by others, as multiples of a
generator by hand.
"""

import time

import harness
import keras
import numpy as np
import tensorflow as tf

import tfopt
from tfopt.bench.report.formatting import ratio
from tfopt.measure import compare
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


def rows_by_hand(texts):
    """Yields rows of shuffled documents, packed one after the other as long as they fit, as `pack` gives them."""
    random = np.random.default_rng()
    arrays = [np.asarray(text, np.int32) for text in texts]
    row, segment, end = _empty_row(), 0, 0
    for number in random.permutation(len(arrays)):
        ids = arrays[number]
        if end + len(ids) > LENGTH:
            yield row
            row, segment, end = _empty_row(), 0, 0
        inputs, labels, weights = row
        segment, place = segment + 1, slice(end, end + len(ids))
        inputs["tokens"][place] = ids
        inputs["segments"][place] = segment
        inputs["positions"][place] = np.arange(len(ids))
        labels[end : end + len(ids) - 1] = ids[1:]
        weights[end : end + len(ids) - 1] = 1
        end += len(ids)
    yield row


def _empty_row():
    inputs = {name: np.zeros(LENGTH, np.int32) for name in ("tokens", "segments", "positions")}
    return inputs, np.zeros(LENGTH, np.int32), np.zeros(LENGTH, np.float32)


def packed_by_hand(texts):
    """A generator's rows in batches."""
    spec = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), _empty_row())
    rows = tf.data.Dataset.from_generator(lambda: rows_by_hand(texts), output_signature=spec)
    return rows.batch(ROWS).prefetch(tf.data.AUTOTUNE)


def packed_by_torch(texts):
    """The same rows, in batches of a DataLoader."""
    from torch.utils.data import DataLoader, IterableDataset

    class Rows(IterableDataset):
        def __iter__(self):
            return rows_by_hand(texts)

    return DataLoader(Rows(), batch_size=ROWS)


def packed_by_grain(texts):
    """Grain's first-fit packing, in batches; its segments and positions, and the labels of each document."""
    import grain

    def example(text):
        ids = np.asarray(text, np.int32)
        return {"tokens": ids, "labels": np.append(ids[1:], np.int32(0)), "weights": np.arange(len(ids)) < len(ids) - 1}

    def arranged(packed):
        inputs = {"tokens": packed["tokens"], "segments": packed["tokens_segment_ids"]}
        inputs["positions"] = packed["tokens_positions"]
        return inputs, packed["labels"], packed["weights"].astype(np.float32)

    documents = grain.MapDataset.source(texts).seed(0).shuffle().map(example).to_iter_dataset()
    lengths = dict.fromkeys(("tokens", "labels", "weights"), LENGTH)
    rows = grain.experimental.FirstFitPackIterDataset(documents, length_struct=lengths, num_packing_bins=64)
    return rows.map(arranged).batch(ROWS)


def measure_batches(texts, turns):
    """Reads the batches of each way in turn; returns what is reported of each that is installed."""
    by_tfopt = build_pipeline(tokens(texts), pack=LENGTH, batch_size=ROWS, remainder="keep", device=None)
    arms = {"generator by hand": packed_by_hand(texts), PACKED: by_tfopt}
    for name, make in {"PyTorch": packed_by_torch, "Grain": packed_by_grain}.items():
        try:
            arms[name] = make(texts)
        except ImportError:
            print(f"{name} is not installed")
    found = {name: contents(name, batches, texts) for name, batches in arms.items()}
    passes = {name: [] for name in arms}
    for _ in range(turns):
        for name, batches in arms.items():
            start = time.perf_counter()
            for _ in batches:
                pass
            passes[name].append(1e3 * (time.perf_counter() - start))
    return compared(found, passes, "generator by hand")


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


def contents(name, batches, texts):
    """What an epoch holds: every token that has a next one, and positions."""
    trained = positions = 0
    for _, labels, weights in batches:
        trained += int(np.asarray(weights).sum())
        positions += int(np.asarray(labels).size)
    expected = sum(len(text) - 1 for text in texts)
    if trained != expected:
        raise AssertionError(f"{name}: {trained:,} tokens in place of {expected:,}")
    return {"tokens": trained, "positions": positions}


def measure_training(texts, turns):
    """Trains each way in turn; returns what is reported of each."""
    arms = {name: (decoder(), dataset) for name, dataset in ways(texts).items()}
    found = {name: contents(name, dataset, texts) for name, (_, dataset) in arms.items()}
    epochs = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, (model, dataset) in arms.items():
            start = time.perf_counter()
            model.fit(dataset, epochs=1, verbose=0, shuffle=False)  # the datasets do
            if turn:  # the first one is traced
                epochs[name].append(1e3 * (time.perf_counter() - start))
    return compared(found, epochs, BASELINE)


def compared(found, passes, baseline):
    """Adds to what was found of each way its times, in ms, and its speed as a multiple of the baseline's."""
    times = {name: harness.one_sample(*each) for name, each in passes.items()}
    for name, each in passes.items():
        against = compare(times[baseline], times[name])
        found[name] |= {
            "epoch_ms": each,
            "tokens_per_second": 1e3 * found[name]["tokens"] / float(np.median(each)),
            "speed": against.ratio,
            "interval": against.interval and list(against.interval),  # None for too few repeats to tell
        }
    return found


def show(figures):
    """Prints a line for each way."""
    for name, one in figures.items():
        print(
            f"{name:30} {one['tokens_per_second']:9,.0f} tokens/s, {ratio(one['speed'], one['interval'])}, "
            f"{one['tokens'] / one['positions']:.0%} of positions used",
            flush=True,
        )


def main():
    """Measures, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--turns", type=int, default=7, metavar="N", help="epochs of each way that are timed; default 7"
    )
    parser.add_argument("--tiny", action="store_true", help="few documents and two turns, to see whether it runs")
    options = parser.parse_args()
    texts, many = (documents(count) for count in ((60, 60) if options.tiny else (800, 20_000)))
    turns = 2 if options.tiny else options.turns
    alone = measure_batches(many, turns)
    show(alone)
    figures = measure_training(texts, turns)
    show(figures)
    document = harness.document(
        documents=len(texts),
        length=LENGTH,
        figures=figures,
        documents_alone=len(many),
        alone=alone,
    )
    harness.write(options.results, document)


if __name__ == "__main__":
    main()
