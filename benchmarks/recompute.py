"""What `tfopt.memory.recompute` saves, and the time it takes: memory of a training step, and its duration.

    python benchmarks/recompute.py [RESULTS.json]

Each net is trained as Keras does it and recomputed, under XLA, in this process. Memory is what `tfopt.memory.estimate`
says, from XLA's buffer assignment: activations, gradients and workspace, without the weights, the optimizer's state and
the batch. Times are of the step alone, all in turn. "activations" computes element-wise functions again; "each layer"
every layer of a chain from its own input, where "auto" makes segments.
"""

from functools import partial

import harness
import keras
import tensorflow as tf

from tfopt.measure import StepTimer, compare, interleave
from tfopt.memory import estimate, recompute

layers = keras.layers
WIDTH, LENGTH, HEADS = 256, 128, 4
REPEATS, STEPS = 6, 3


class Block(layers.Layer):
    """A transformer's block: attention and a perceptron, both normalised before and with dropout."""

    def __init__(self):
        super().__init__()
        self.norms = [layers.LayerNormalization(), layers.LayerNormalization()]
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=0.1)
        self.row = [layers.Dense(4 * WIDTH, activation="gelu"), layers.Dense(WIDTH), layers.Dropout(0.1)]

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (*self.norms, self.row[0]):
            layer.build(shape)
        self.row[1].build((*shape[:-1], 4 * WIDTH))

    def call(self, inputs):
        normed = self.norms[0](inputs)
        outputs = inputs = inputs + self.attention(normed, normed, use_causal_mask=True)
        for layer in (self.norms[1], *self.row):
            outputs = layer(outputs)
        return inputs + outputs


def transformer():
    inputs = keras.Input((LENGTH,), dtype="int32")
    outputs = layers.Embedding(1000, WIDTH)(inputs)
    for _ in range(12):
        outputs = Block()(outputs)
    ids = tf.random.uniform((8, LENGTH), 0, 1000, tf.int32)
    return keras.Model(inputs, layers.Dense(1000, activation="softmax")(outputs)), (ids, ids)


def chain():
    row = [layers.Dense(WIDTH, activation="gelu") for _ in range(64)]
    values = tf.random.normal((4096, WIDTH))
    model = keras.Sequential([keras.Input((WIDTH,)), *row, layers.Dense(10, activation="softmax")])
    return model, (values, labels(4096))


def residual_net():
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    return model, (tf.random.uniform((16, 64, 64, 3)), labels(16))


def labels(count):
    return tf.random.uniform((count,), 0, 10, tf.int32)


NETS = {
    "transformer, 12 blocks": (transformer, ("auto", "activations")),
    "64 dense layers": (chain, ("auto", "activations", "each layer")),
    "ResNet-50": (residual_net, ("auto",)),
}


def measured(name):
    """The figures of one net, plain and in each choice."""
    make, choices = NETS[name]
    figures, timers = {}, {}
    for choice in ("plain", *choices):
        keras.utils.set_random_seed(0)
        model, batch = make()
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=True)
        chosen = model.layers[:-1] if choice == "each layer" else choice
        count = 0 if choice == "plain" else recompute(model, chosen)
        found = estimate(model, batch)
        mib = found.activations_mib + found.gradients_mib + found.workspace_mib
        figures[choice] = {"recomputed": count, "mib": mib, "activations_mib": found.activations_mib}
        timers[choice] = partial(StepTimer(model, batch), STEPS, warmup=1, samples=1)
    times = interleave(timers, REPEATS)
    for choice, figure in figures.items():
        slower = compare(times[choice], times["plain"])
        low, high = slower.interval
        share = figure["mib"] / figures["plain"]["mib"]
        figure |= {"memory_share": share, "ms": times[choice].median_ms, "time_ratio": slower.ratio}
        figure["time_ratio_interval"] = [low, high]
        print(
            f"{name:22} {choice:11} {figure['recomputed']:3} recomputed, {figure['mib']:7.1f} MiB "
            f"({100 * share:3.0f} %), {figure['ms']:7.1f} ms a step, {slower.ratio:.2f} times as long "
            f"(95 %: {low:.2f}–{high:.2f})",
            flush=True,
        )
    return figures


def main():
    """Measures all nets, and writes the figures if there is a path."""
    results = harness.parser(__doc__).parse_args().results
    document = harness.document(steps=STEPS * REPEATS, figures={})
    for name in NETS:
        document["figures"][name] = measured(name)
        harness.write(results, document)


if __name__ == "__main__":
    main()
