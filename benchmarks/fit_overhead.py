"""What `fit` adds to a step of a tiny model: stock, and with tfopt.fit.overlap; and how often it converts logs.

    python benchmarks/fit_overhead.py [RESULTS.json]

Prints the medians, and writes them with the raw samples and the environment. Stock fit, overlapped fit and the bare
step, on a batch that lies on the device, are timed in turn. The goals: overlapped, fit adds at most a third of what
stock fit adds; logs are converted once in every `log_every` steps, and for an epoch's first and last, where stock fit
converts them on each.
"""

import contextlib
import io
from unittest import mock

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt import fit
from tfopt.internals.sources import find
from tfopt.measure import FitTimer, StepTimer, interleave

REPEATS = 31  # short turns: the speed of a shared machine drifts within seconds
STEPS = 200
BATCH = 32
LOG_EVERY = 20
CONVERTED_STEPS = 200


def tiny_net():
    """Two small dense layers with a metric, compiled."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("sgd", loss, metrics=["accuracy"], jit_compile=False)
    return net


def batches():
    """Batches of noise, cached in memory."""
    random = np.random.default_rng(0)
    arrays = random.random((64 * BATCH, 8), "float32"), random.integers(4, size=64 * BATCH)
    return tf.data.Dataset.from_tensor_slices(arrays).batch(BATCH, drop_remainder=True).cache().prefetch(4)


def overhead(dataset):
    """Times in turn, the medians of each, and the overlapped fit's overhead over the stock one's with its interval."""
    nets = {"stock": tiny_net(), "overlapped": fit.overlap(tiny_net(), log_every=LOG_EVERY), "step": tiny_net()}
    timers = {name: FitTimer(net, dataset) for name, net in nets.items() if name != "step"}
    timers["step"] = StepTimer(nets["step"], dataset)
    times = interleave({name: lambda timer=timer: timer(STEPS) for name, timer in timers.items()}, repeats=REPEATS)
    turns = np.array([[np.median(times[name].repeats_ms, axis=1)] for name in ("stock", "overlapped", "step")])[:, 0]
    return times, _ratio(turns), harness.interval(_ratio, turns)


def _ratio(turns):
    stock, overlapped, step = np.median(turns, axis=1)
    return float((overlapped - step) / (stock - step))


def conversions(net, dataset):
    """How often logs with tensors in them are converted in one epoch with a progress bar."""
    counted, (python_utils, _) = [], find("keras.src.utils.python_utils:pythonify_logs")

    def convert(logs, stock=python_utils.pythonify_logs):
        counted.append(any(tf.is_tensor(value) for value in (logs or {}).values()))
        return stock(logs)

    with (
        mock.patch.object(python_utils, "pythonify_logs", convert),
        mock.patch("tfopt.fit.logs.pythonify_logs", convert),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        net.fit(dataset.repeat(), steps_per_epoch=CONVERTED_STEPS, shuffle=False)
    return sum(counted)


def main():
    """Measures, prints and writes."""
    results = harness.parser(__doc__).parse_args().results
    dataset = batches()
    times, ratio, interval = overhead(dataset)
    converted = {
        "stock": conversions(tiny_net(), dataset),
        "overlapped": conversions(fit.overlap(tiny_net(), log_every=LOG_EVERY), dataset),
    }
    for name, of in times.items():
        print(f"{name}: {of}")
    print(f"overhead, overlapped over stock: {ratio:.2f} (95 %: {interval[0]:.2f}–{interval[1]:.2f})")
    print(f"conversions of logs in {CONVERTED_STEPS} steps: {converted['overlapped']}, stock {converted['stock']}")
    document = harness.document(
        times={name: of.to_dict() for name, of in times.items()},
        overhead_ratio=ratio,
        interval=interval,
        conversions=converted | {"steps": CONVERTED_STEPS, "log_every": LOG_EVERY},
    )
    harness.write(results, document)


if __name__ == "__main__":
    main()
