"""What sending less does to a training: bytes, time of a step, and the loss after the same steps, in two processes.

    python benchmarks/less_traffic.py [RESULTS.json] [--tiny]

Trains a perceptron on scikit-learn's digits: with the gradients summed in 32 bits, compressed in each way that
`compress_gradients` knows, and with `LocalSteps`. Prints a line for each, and writes them with the environment. The
processes share this machine's CPUs and its loopback, where nothing waits for a network: the times say what compression
costs, not what it saves. Run nothing else that uses the loopback meanwhile, or the measured bytes are too many. With
--tiny, each trains for a few steps only, to see that it runs.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt import distribute
from tfopt.bench.workloads import digits
from tfopt.callbacks import LocalSteps
from tfopt.distribute import LowRank, compress_gradients
from tfopt.hardware.host_activity import sent_bytes

WORKER, TINY = "--worker", "--tiny"
STEPS, WARM_UP, SEEDS = (16, 4, (0,)) if TINY in sys.argv else (120, 20, (0, 1, 2))
BATCH, WIDTH = 128, 256
EVERY = 8


def arms():
    """What is compared: a method of `compress_gradients`, or a callback, or neither."""
    outer = keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    return {
        "float32": (None, None),
        "bfloat16": ("bfloat16", None),
        "float16": ("float16", None),
        "LowRank(4)": (LowRank(4), None),
        f"LocalSteps({EVERY})": (None, LocalSteps(EVERY)),
        f"LocalSteps({EVERY}, outer)": (None, LocalSteps(EVERY, outer=outer)),
    }


def trained(strategy, method, local, seed):
    """Trains once: the losses, the time of a step, and the bytes that each process sends for it."""

    class Clocks(keras.callbacks.Callback):
        """Reads the time and the loopback's counter after the warm-up and at the end."""

        def on_train_batch_end(self, batch, logs=None):
            """Reads them after the warm-up."""
            if batch + 1 == WARM_UP:
                self.before = np.array([time.perf_counter(), sent_bytes() or np.nan])

        def on_train_end(self, logs=None):
            """Reads them at the end."""
            self.each = (np.array([time.perf_counter(), sent_bytes() or np.nan]) - self.before) / (STEPS - WARM_UP)

    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = digits.perceptron(width=WIDTH, jit_compile=False)
    if method:
        compress_gradients(model, method)
    images, labels = digits.perceptron_batch(len(digits.data()[0].labels))
    data = tf.data.Dataset.from_tensor_slices((images, labels))
    data = data.shuffle(len(labels), seed=seed).repeat().batch(BATCH, drop_remainder=True)
    clocks = Clocks()
    callbacks = [local, clocks] if local else [clocks]
    model.fit(data, steps_per_epoch=STEPS, verbose=0, shuffle=False, callbacks=callbacks)
    loss = model.evaluate(images, labels, batch_size=479, verbose=0)
    seconds, sent = clocks.each
    found = {"loss": float(loss), "ms_per_step": 1e3 * seconds, "measured_sent_bytes_per_step": float(sent / 2)}
    weights = sum(int(np.prod(weight.shape)) for weight in model.trainable_variables)
    if local:
        # Over a ring of two, each sends what it sums once: weights at the end of a round, Adam's moments of an epoch.
        found |= {"synchronizations": local.synchronizations}
        found["sent_bytes_per_step"] = 4 * weights * (local.synchronizations - 1 + 2) / STEPS
    else:
        found["synchronizations"] = STEPS
        found["sent_bytes_per_step"] = model.optimizer.compression.sent_bytes if method else 4 * weights
    return found


def work(path):
    """Trains everything in this process, one of two, and writes what was found."""
    strategy = distribute.strategy("auto")
    runs = {name: [] for name in arms()}
    for seed in SEEDS:
        for name, (method, local) in arms().items():
            runs[name].append(trained(strategy, method, local, seed))
    if distribute.resolve().is_chief:
        harness.write(path, runs)


def main():
    """Starts both processes, and reports."""
    parser = harness.parser(__doc__)
    parser.add_argument(TINY, action="store_true", help="few steps, to see that it runs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "runs.json")
        launch = [
            sys.executable,
            "-m",
            "tfopt.distribute.launch",
            "-n",
            "2",
            __file__,
            WORKER,
            path,
            *[TINY] * options.tiny,
        ]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        subprocess.run(launch, check=True, env=environ, stdout=subprocess.DEVNULL)
        runs = harness.read(path)
    figures = {}
    for name, each in runs.items():
        figures[name] = {key: float(np.median([run[key] for run in each])) for key in each[0]} | {"runs": each}
        one = figures[name]
        print(
            f"{name:22} loss {one['loss']:.4f}, {one['sent_bytes_per_step']:12,.0f} bytes a step (measured "
            f"{one['measured_sent_bytes_per_step']:12,.0f}), {one['ms_per_step']:6.1f} ms, "
            f"{one['synchronizations']:.0f} synchronizations"
        )
    document = harness.document(steps=STEPS, batch_size=BATCH, replicas=2, figures=figures)
    harness.write(options.results, document)


if __name__ == "__main__":
    work(sys.argv[2]) if sys.argv[1:2] == [WORKER] else main()
