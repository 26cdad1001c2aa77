"""Precision per layer beside float32 and all layers in 16 bits: what tfopt.precision.assign finds for three models.

    python benchmarks/precision_per_layer.py [RESULTS.json] [--model NAME]
    python benchmarks/precision_per_layer.py RESULTS.json --table

Prints what it finds and a table, and writes the raw samples and the environment, after each model. Steps are measured
by CPU time too, which other programs on the machine disturb less.
"""

import time
from functools import partial

import harness
import keras
import numpy as np

from tfopt import precision
from tfopt.bench.report.formatting import ratio
from tfopt.measure import StepTimer, StepTimes, compare, interleave

TURNS, STEPS = 8, 5  # by CPU time
_layers = keras.layers
_random = np.random.default_rng(0)


def mlp():
    """Dense layers that matrix products dominate."""
    x = inputs = keras.Input((784,))
    for _ in range(3):
        x = _layers.Dense(1024, activation="relu")(x)
    data = _random.normal(size=(256, 784)).astype("float32"), _random.integers(10, size=256)
    return keras.Model(inputs, _layers.Dense(10, name="head")(x), name="mlp"), data


def cnn():
    """Convolutions with batch normalisation and swish."""
    x = inputs = keras.Input((32, 32, 3))
    for filters in (32, 64, 128):
        x = _layers.BatchNormalization()(_layers.Conv2D(filters, 3, padding="same", use_bias=False)(x))
        x = _layers.MaxPooling2D()(_layers.Activation("swish")(x))
    outputs = _layers.Dense(10, name="head")(_layers.GlobalAveragePooling2D()(x))
    data = _random.normal(size=(32, 32, 32, 3)).astype("float32"), _random.integers(10, size=32)
    return keras.Model(inputs, outputs, name="cnn"), data


def transformer():
    """Two blocks of attention and dense layers over 64 tokens."""
    inputs = keras.Input((64,), dtype="int32")
    x = _layers.Embedding(1000, 256)(inputs)
    for _ in range(2):
        normed = _layers.LayerNormalization()(x)
        x = _layers.Add()([x, _layers.MultiHeadAttention(4, 64)(normed, normed, use_causal_mask=True)])
        inner = _layers.Activation("gelu")(_layers.Dense(1024)(_layers.LayerNormalization()(x)))
        x = _layers.Add()([x, _layers.Dense(256)(inner)])
    model = keras.Model(inputs, _layers.Dense(1000, name="head")(x), name="transformer")
    tokens = _random.integers(1000, size=(16, 64)).astype("int32")
    return model, (tokens, tokens)


MODELS = {
    "MLP of 3 × 1,024 units, 256 examples": mlp,
    "CNN with batch normalisation and swish, 32 images of 32×32": cnn,
    "Transformer of 2 blocks, 16 × 64 tokens": transformer,
}


def compiled(make):
    """A model and its batch, the same each time, names included."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model, data = make()
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, data


def measured(make):
    """What `assign` finds for a model, as JSON, with the seconds that it takes and steps by CPU time."""
    started = time.perf_counter()
    found = precision.assign(*compiled(make))
    seconds = time.perf_counter() - started
    print(found, flush=True)
    policies = {"float32": "float32", "mixed_bfloat16": "mixed_bfloat16", "chosen": found.policy}
    timers = {}
    for name, policy in policies.items():
        model, data = compiled(make)
        precision.apply(model, policy)
        timers[name] = partial(StepTimer(model, data, clock=time.process_time), STEPS, warmup=1, samples=1)
    cpu = {name: times.to_dict() for name, times in interleave(timers, TURNS).items()}
    return found.to_dict() | {"seconds": seconds, "cpu_times": cpu}


def markdown(document):
    """The table of a recorded run."""
    heads = ("Model", "Float32", "16 bits throughout", "By CPU time", "Chosen", "Speed", "By CPU time", "Error")
    lines = []
    for name, found in document["models"].items():
        wall, cpu = (
            {variant: StepTimes.from_dict(its) for variant, its in found[clock].items()}
            for clock in ("times", "cpu_times")
        )
        half = [layer for layer in found["layers"] if layer["policy"] != "float32"]
        of_all = f"16 bits in {len(half)} of {len(found['layers'])} layers" if half else "float32"
        cells = [
            name,
            f"{wall['float32'].median_ms:.3g} ms",
            _speed(compare(wall["float32"], wall["mixed_bfloat16"])),
            _speed(compare(cpu["float32"], cpu["mixed_bfloat16"])),
            of_all,
            ratio(found["speedup"]["float32"]["ratio"], found["speedup"]["float32"]["interval"]) if half else "–",
            _speed(compare(cpu["float32"], cpu["chosen"])) if half else "–",
            f"{100 * found['error']:.2g} %" if half else "–",
        ]
        lines.append(cells)
    return harness.table(heads, lines, right={*heads} - {"Model", "Chosen"}) + "\n"


def _speed(comparison):
    return ratio(comparison.ratio, comparison.interval)


def main():
    """Measures, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--model", action="append", default=[], metavar="NAME", help="begins so; may be repeated")
    parser.add_argument("--table", action="store_true", help="print the table of RESULTS.json as Markdown")
    options = parser.parse_args()
    if options.table:
        print(markdown(harness.read(options.results)), end="")
        return
    document = harness.document(models={})
    for name, make in MODELS.items():
        if options.model and not name.startswith(tuple(options.model)):
            continue
        document["models"][name] = measured(make)
        harness.write(options.results, document)
    print()
    print(markdown(document), end="")


if __name__ == "__main__":
    main()
