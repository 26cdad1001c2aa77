"""Five trainings that 16 bits silently spoil: to the end in each dtype, with tfopt's remedy, and what tfopt reports.

    python benchmarks/precision_faults.py [RESULTS.json] [--seeds N] [--only NAME ...]

Each model is trained in float32, by stock Keras under mixed_bfloat16 and mixed_float16, and in bfloat16 as
`precision.check` advises: under the policy if it passes, else under the fallback. Recorded: the accuracy on examples
that were not trained on; what `check` says of bfloat16 before the first step; at which step `PrecisionMonitor`
warns; and the share of the time that the monitor takes, by its own count and by the difference it makes.
"""

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import harness
import keras
import numpy as np

from tfopt import precision, repairs
from tfopt.callbacks import PrecisionMonitor

layers, ops = keras.layers, keras.ops
LENGTH = 1024
BATCH = 64
WORDS = 5000
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
REMEDY = "tfopt"
COST = "cost of the monitor"
HEADS = ("training", "float32", "bfloat16", "float16", "with tfopt", "`check`, bfloat16", "`PrecisionMonitor`")


def angles(dtype, pairs):
    """Angles of sinusoidal positions, shape (LENGTH, pairs), from numbers of one dtype."""
    positions = ops.cast(ops.arange(LENGTH), dtype)
    frequencies = ops.cast(np.pi / 2 ** (1 + np.arange(pairs)), dtype)
    return positions[:, None] * frequencies


class Positions(layers.Layer):
    """Sines and cosines of the position of the one marked element, computed in the layer's dtype."""

    def call(self, marks):
        """Marks of shape (batch, LENGTH) to features of shape (batch, 16)."""
        table = angles(self.compute_dtype, 8)
        return ops.matmul(marks, ops.concatenate([ops.sin(table), ops.cos(table)], axis=-1))


class Rotary(layers.Layer):
    """Products of two trained vectors after rotary position embedding, with its angles in the layer's dtype."""

    def build(self, shape):
        """Two vectors of 8 pairs."""
        self.pairs = self.add_weight(shape=(2, 2, 8), initializer="random_normal", name="pairs")

    def call(self, positions):
        """Positions of shape (batch, 2) to features of shape (batch, 16)."""
        table = angles(self.compute_dtype, 8)
        rotated = []
        for place in range(2):
            angle = ops.take(table, positions[:, place], axis=0)
            sine, cosine, (a, b) = ops.sin(angle), ops.cos(angle), (self.pairs[place, 0], self.pairs[place, 1])
            rotated.append((a * cosine - b * sine, a * sine + b * cosine))
        (a, b), (c, d) = rotated
        return ops.concatenate([a * c + b * d, a * d - b * c], axis=-1)


class MovingScale(layers.Layer):
    """Divides by the batch's root mean square while training, and later by a moving average of it."""

    def build(self, shape):
        """One average per feature."""
        self.squares = self.add_weight(shape=shape[-1:], initializer="ones", trainable=False, name="squares")

    def call(self, x, training=False):
        """Inputs of shape (batch, features)."""
        squares = self.squares
        if training:
            squares = ops.mean(ops.square(x), axis=0)
            self.squares.assign(0.998 * self.squares + 0.002 * squares)
        return x / ops.sqrt(squares + 1e-6)


def positions(random, examples):
    """The marked position; the class is a bit of it."""
    places = random.integers(LENGTH, size=examples)
    return np.eye(LENGTH, dtype="float32")[places], places // 2 % 2


def distances(random, examples):
    """Two positions at most 8 apart; the class is whether their distance is a multiple of 4 or one more."""
    first = random.integers(8, LENGTH - 8, size=examples)
    apart = random.integers(-8, 9, size=examples)
    return np.stack([first, first + apart], axis=1).astype("int32"), (apart % 4 < 2).astype("int64")


def years(random, examples):
    """Years beside seven other features; the class depends on a cycle of 12 years and on them."""
    rows = random.normal(size=(examples, 8)).astype("float32")
    rows[:, 0] = random.integers(1990, 2027, size=examples)
    return rows, (np.sin(2 * np.pi * (rows[:, 0] - 1990) / 12) + 0.2 * rows[:, 1] > 0).astype("int64")


def small_features(random, examples):
    """Features of a size of 0.3; the class is whether they are near zero."""
    rows = random.normal(size=(examples, 3)).astype("float32")
    return 0.3 * rows, (np.square(rows).sum(axis=1) > 2.37).astype("int64")


TABLE = np.random.default_rng(0).integers(2, size=WORDS)


def ids(random, examples):
    """Ids of 5,000 words; the class is a property of the word."""
    words = random.integers(WORDS, size=(examples, 1)).astype("int32")
    return words, TABLE[words[:, 0]]


def classifier(*first):
    """A net of two classes whose head stays in float32, as Keras' guide advises."""
    hidden = [layers.Dense(64, activation="relu", name=f"hidden_{number}") for number in (1, 2)]
    return keras.Sequential([*first, *hidden, layers.Dense(2, dtype="float32", name="head")], name="net")


@dataclass(frozen=True)
class Training:
    """One of the five."""

    name: str
    data: Callable[..., Any]
    """Function of a generator and a number of examples."""
    make: Callable[[], keras.Model]
    """Function that builds the net under the global policy."""
    examples: int
    epochs: int
    rate: float = 3e-3


TRAININGS = (
    Training(
        "positions to 1,024",
        positions,
        lambda: classifier(keras.Input((LENGTH,)), Positions(name="positions")),
        4096,
        8,
    ),
    Training(
        "rotary positions to 1,024",
        distances,
        lambda: classifier(keras.Input((2,), dtype="int32"), Rotary(name="rotary")),
        8192,
        8,
    ),
    Training(
        "a year among the features",
        years,
        lambda: classifier(
            keras.Input((8,)), layers.Rescaling([1 / 4, *[1] * 7], offset=[-502, *[0] * 7], name="rescaling")
        ),
        4096,
        24,
    ),
    Training(
        "a moving average",
        small_features,
        lambda: classifier(keras.Input((3,)), MovingScale(name="scale")),
        4096,
        40,
    ),
    Training(
        "ids",
        ids,
        lambda: classifier(layers.Embedding(5120, 16, name="words"), layers.Flatten(name="flat")),
        20480,
        6,
        1e-2,
    ),
)


def compiled(training, policy, seed):
    """A net made and compiled under a global policy, by Keras alone."""
    for repair in repairs.REPAIRS.values():
        if repair.installed:  # by `apply`, for the rest of the process
            repair.remove()
    keras.utils.set_random_seed(seed)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        net = training.make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.Adam(training.rate), loss, metrics=["accuracy"], steps_per_execution=8)
    finally:
        keras.config.set_dtype_policy(before)
    return net


def data_of(training):
    """Examples to train on, and as many others."""
    random = np.random.default_rng(1)
    return training.data(random, training.examples), training.data(random, training.examples)


def said(net, batch, policy):
    """What `check` reports before the first step, and its fallback."""
    report = precision.check(net, batch, policy)
    fallback = None if report.fallback is None else dict(report.fallback)
    return {"passed": report.passed, "problems": list(report.problems), "fallback": fallback}


def train(net, training, callbacks=()):
    """Accuracy on the examples not trained on, at the end."""
    (x, y), others = data_of(training)
    net.fit(x, y, batch_size=BATCH, epochs=training.epochs, verbose=0, callbacks=list(callbacks))
    return net.evaluate(*others, batch_size=512, verbose=0, return_dict=True)["accuracy"]


def one_training(training, seeds, save):
    """All variants of a training, in turn for each seed."""
    (x, y), _ = data_of(training)
    batch = x[:BATCH], y[:BATCH]
    found = {"name": training.name, "steps": training.epochs * (len(x) // BATCH)}
    found["accuracy"] = {policy: [] for policy in (*POLICIES, REMEDY)}
    net = compiled(training, "float32", 0)
    net.build((None, *x.shape[1:]))
    found["remedy"] = said(net, batch, "mixed_bfloat16")
    for seed in range(seeds):
        for policy in POLICIES:
            net = compiled(training, policy, seed)
            watched = seed == 0 and policy == "mixed_bfloat16"
            if watched:
                found["check"] = said(net, batch, {})
            monitor = PrecisionMonitor(batch, every_steps=50)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the monitor's readings hold them
                found["accuracy"][policy].append(train(net, training, [monitor] * watched))
            if watched:
                warned = next((reading for reading in monitor.to_dict()["readings"] if reading["problems"]), None)
                found["monitor"] = {"warned": warned, "compared": len(monitor.readings), "share": monitor.share}
        net = compiled(training, "float32", seed)
        net.build((None, *x.shape[1:]))
        if found["remedy"]["fallback"] is not None:
            precision.apply(net, found["remedy"]["fallback"] or "mixed_bfloat16")
        found["accuracy"][REMEDY].append(train(net, training))
        save(found)
    return found


def cost(rounds):
    """Seconds of a training with the monitor and without, in turn, and the monitor's own count of its share."""
    training = next(training for training in TRAININGS if training.name == "a moving average")
    (x, y), _ = data_of(training)
    clocks = {"wall": time.perf_counter, "process": time.process_time}
    seconds = {clock: {"without": [], "with": []} for clock in clocks}
    shares = []
    net = compiled(training, "mixed_bfloat16", 0)
    monitor = PrecisionMonitor((x[:BATCH], y[:BATCH]))
    for number in range(rounds + 1):
        for name, callbacks in (("without", []), ("with", [monitor])):
            before = {clock: read() for clock, read in clocks.items()}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                net.fit(x, y, batch_size=BATCH, epochs=training.epochs, verbose=0, callbacks=callbacks)
            if number:  # the first round traces
                for clock, read in clocks.items():
                    seconds[clock][name].append(read() - before[clock])
        shares.append(monitor.share)
    return {"seconds": seconds, "shares": shares[1:], "compared": len(monitor.readings)}


def markdown(document):
    """The table of docs/precision.md."""
    rows = []
    for training in document["trainings"]:
        accuracies = [cell(training["accuracy"][policy]) for policy in (*POLICIES, REMEDY)]
        passed = training["check"]["passed"]
        warned = training["monitor"]["warned"]
        rows.append(
            (
                training["name"],
                *accuracies,
                "passes" if passed else "does not pass",
                f"step {warned['step']:,}" if warned else "silent",
            )
        )
    return harness.table(HEADS, rows)


def cell(accuracies):
    """The median, with the smallest and the largest where they differ."""
    low, middle, high = min(accuracies), statistics.median(accuracies), max(accuracies)
    spread = f" [{low:.3f}–{high:.3f}]" if f"{low:.3f}" != f"{high:.3f}" else ""
    return f"{middle:.3f}{spread}"


def main():
    """Trains, prints and writes, each training as soon as it is done."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="trainings of each kind; default 3")
    names = [*(training.name for training in TRAININGS), COST]
    parser.add_argument(
        "--only", action="append", choices=names, help="measure only these again, and keep the rest of RESULTS"
    )
    options = parser.parse_args()
    document = harness.document(status="running", trainings=[])
    if options.only:
        document = harness.read(options.results, document)
    done = {training["name"]: training for training in document["trainings"]}

    def save(found=None):
        if found:
            done[found["name"]] = found
        document["trainings"] = [done[name] for name in names if name in done]
        harness.write(options.results, document)

    for training in TRAININGS:
        if training.name in (options.only or names):
            started = time.perf_counter()
            found = one_training(training, options.seeds, save)
            shown = {name: cell(one) for name, one in found["accuracy"].items()}
            print(f"{training.name}: {shown}, {time.perf_counter() - started:.0f} s", flush=True)
    if COST in (options.only or names):
        document["monitor_cost"] = cost(3)
    document["status"] = "complete"
    save()
    print(markdown(document))


if __name__ == "__main__":
    main()
