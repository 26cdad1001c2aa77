"""Several training steps in one launch: whether they train as stock `fit` does, and what they save.

    python benchmarks/many_steps.py [RESULTS.json] [--turns N] [--page]

Trains every kind of training of tests/support/kinds.py twice, by stock `fit` and in launches of three steps, with XLA
and without, and records whether weights, optimizer, history and the logs of each step are equal bit for bit. Then times
small models in turn, by the CPU time of a step: stock `fit`, overlapped, in launches, with `steps_per_execution`, and a
loop by hand. The goals, over overlapped `fit`: at least 1.4 times as fast for a perceptron, 1.15 for a convolutional
net, 1.05 for a transformer of two blocks, and 1.8 for the perceptron with `cache="device"`. With `--page`, fills
docs/fit.md from the file and measures nothing.
"""

import sys
import time
import warnings
from pathlib import Path

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt import fit
from tfopt.fit.launching import overlapped_step
from tfopt.pipelines import build_pipeline

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from fitting import Pair, Trace
from kinds import KINDS

PAGE = harness.ROOT / "docs" / "fit.md"
STEPS = 16
BATCH = 32
EPOCH = 128  # steps
TURNS = 9
L = keras.layers


def perceptron():
    """784-64-10, and its data."""
    layers = [keras.Input((784,)), L.Dense(64, activation="relu"), L.Dense(10)]
    return layers, (784,), None


def convolutional():
    """Two small convolutions with batch norm on images of 16 by 16."""
    layers = [keras.Input((16, 16, 3))]
    for filters in (8, 16):
        layers += [L.Conv2D(filters, 3, strides=2, use_bias=False), L.BatchNormalization(), L.ReLU()]
    return [*layers, L.Flatten(), L.Dense(10)], (16, 16, 3), None


def transformer():
    """Two blocks of width 32 over 16 words."""
    words = x = keras.Input((16,), dtype="int32")
    x = L.Embedding(100, 32)(x)
    for _ in range(2):
        x = L.LayerNormalization()(x + L.MultiHeadAttention(2, 16)(x, x))
        x = L.LayerNormalization()(x + L.Dense(32)(L.Dense(64, activation="gelu")(x)))
    return keras.Model(words, L.Dense(10)(L.GlobalAveragePooling1D()(x))), (16,), 100


NETS = {"perceptron": perceptron, "convolutional net": convolutional, "transformer": transformer}
GOALS = {"perceptron": 1.4, "convolutional net": 1.15, "transformer": 1.05, "perceptron, cache='device'": 1.8}


def compiled(net, **options):
    """A net of `NETS`, compiled."""
    keras.utils.set_random_seed(0)
    layers, *_ = NETS[net]()
    model = layers if isinstance(layers, keras.Model) else keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, metrics=["accuracy"], jit_compile=False, **options)
    return model


def arrays(net):
    """An epoch of noise for a net."""
    _, shape, words = NETS[net]()
    random = np.random.default_rng(0)
    count = EPOCH * BATCH
    x = random.integers(words, size=(count, *shape)) if words else random.random((count, *shape), "float32")
    return x.astype("int32" if words else "float32"), random.integers(10, size=count)


def by_hand(model, dataset):
    """A function that trains an epoch by a loop over a traced train_step."""
    step = tf.function(model.train_step)

    def train():
        for batch in dataset:
            step(batch)

    return train


def variants(net, *, device=False):
    """Functions that train an epoch, by name."""
    if device:
        dataset = build_pipeline(arrays(net), batch_size=BATCH, cache="device", shuffle=False)
    else:
        dataset = tf.data.Dataset.from_tensor_slices(arrays(net)).batch(BATCH, drop_remainder=True).cache().prefetch(4)
    models = {
        "overlapped": fit.overlap(compiled(net)),
        "launches": fit.overlap(compiled(net), steps_per_launch=STEPS),
    }
    found = {}
    if not device:
        models |= {"stock": compiled(net), "steps_per_execution": compiled(net, steps_per_execution=STEPS)}
        hand = compiled(net)
        hand.optimizer.build(hand.trainable_variables)
        found["by hand"] = by_hand(hand, dataset)
    for name, model in models.items():
        found[name] = lambda model=model: model.fit(dataset, epochs=1, verbose=0, shuffle=False)
    return found


def timed(trainings, turns):
    """Microseconds of CPU time a step, of each training in turn."""
    found = {name: [] for name in trainings}
    for turn in range(turns + 1):
        for name, train in trainings.items():
            began = time.process_time()
            train()
            if turn:  # the first traces
                found[name].append(1e6 * (time.process_time() - began) / EPOCH)
    return found


def _ratio(turns):
    overlapped, launches = turns
    return np.median(overlapped / launches, axis=-1)


def is_equal(make, arguments, *, jit):
    """Whether steps were launched by three, and trained as stock `fit` does."""

    def train(model):
        model.jit_compile = jit
        trace = Trace()
        history = model.fit(**{"verbose": 0, "shuffle": False} | arguments(), epochs=3, callbacks=[trace])
        return history.history, trace.calls

    pair = Pair(make, steps_per_launch=3)
    try:
        pair.train(train)
    except AssertionError:
        return False
    return bool(overlapped_step(pair.overlapped)._programs)


def table(document):
    """The table of docs/fit.md."""
    rows = []
    for case, found in document["times"].items():
        median = {name: float(np.median(turns)) for name, turns in found["microseconds"].items()}
        ratio, (low, high) = found["ratio"], found["interval"]
        cells = [f"{median[name]:,.0f}" if name in median else "–" for name in ("stock", "overlapped", "launches")]
        cells += [f"{median[name]:,.0f}" if name in median else "–" for name in ("steps_per_execution", "by hand")]
        rows.append([case, *cells, f"{ratio:.2f}× ({low:.2f}–{high:.2f})"])
    heads = ("", "stock", "overlapped", f"launches of {STEPS}", f"`steps_per_execution={STEPS}`", "loop by hand")
    equal = document["equal"]
    same = sum(equal.values())
    text = harness.table((*heads, "launches over overlapped"), rows, right=heads[1:])
    return f"{text}\n\nOf {len(equal)} kinds of training, {same} were equal to stock `fit`, bit for bit."


def main():
    """Trains, times, prints and writes."""
    command = harness.parser(__doc__, harness.RESULTS / "many-steps-cpu.json")
    command.add_argument("--turns", type=int, default=TURNS, metavar="N", help="turns of each variant")
    command.add_argument("--page", action="store_true", help="fill in the table of docs/fit.md")
    options = command.parse_args()
    if options.page:
        harness.fill(PAGE, "many-steps", table(harness.read(options.results)))
        return
    warnings.simplefilter("ignore")
    document = harness.document(times={}, equal={}, goals=GOALS, steps=STEPS)
    for case in GOALS:
        net, _, kind = case.partition(", ")
        found = timed(variants(net, device=bool(kind)), options.turns)
        turns = np.array([found["overlapped"], found["launches"]])
        interval = harness.interval(_ratio, turns)
        document["times"][case] = {"microseconds": found, "ratio": float(_ratio(turns)), "interval": interval}
        print(
            case, {name: round(float(np.median(of))) for name, of in found.items()}, f"{_ratio(turns):.2f}", flush=True
        )
    for jit in (False, True):
        for name, (make, arguments) in KINDS.items():
            kind = f"{name}, compiled" if jit else name
            document["equal"][kind] = is_equal(make, arguments, jit=jit)
            print(kind, document["equal"][kind], flush=True)
            harness.write(options.results, document)


if __name__ == "__main__":
    main()
