"""What deciding costs: tfopt.xla.decide beyond the steps it times, in first steps with XLA, and the precision gate.

    python benchmarks/decisions.py [RESULTS.json] [--repeats N]

Prints the medians, and writes the raw samples and the environment, each as soon as it is measured. The goals: what a
decision takes beyond its timed steps is no more than two first steps with XLA (tracing and compiling); the gate takes
under 20 seconds.
"""

import statistics
import time
from functools import partial

import harness
import keras
import numpy as np

from tfopt import precision, xla
from tfopt.bench.workloads import digits
from tfopt.measure import StepTimer

BATCH = 64


def dense_net(dropout):
    """A net of dense layers, compiled; XLA makes it faster on a CPU too."""
    layers = [keras.layers.Dense(512, activation="relu") for _ in range(2)]
    head = [keras.layers.Dropout(dropout), keras.layers.Dense(10, dtype="float32")]
    net = keras.Sequential([keras.Input((784,)), *layers, *head])
    net.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return net


def dense_batch():
    """Noise of MNIST's shape."""
    random = np.random.default_rng(0)
    return random.random((BATCH, 784), "float32"), random.integers(10, size=BATCH).astype("int32")


def decide(net, batch):
    """Seconds that a decision takes, seconds of the steps that it times, and the decision."""
    started = time.perf_counter()
    decision = xla.decide(net, batch)
    seconds = time.perf_counter() - started
    if decision.off is None:
        raise SystemExit(f"XLA does not run here: {decision.reason}")
    timed = sum(sum(times.samples_ms) * times.steps_per_sample / 1000 for times in (decision.off, decision.on))
    return seconds, timed, decision


def first_step(net, batch):
    """Seconds of the first step with XLA: tracing, compiling, and the step."""
    return StepTimer(net, batch, jit_compile=True)(1, warmup=0, samples=1).first_step_seconds


def check(net, batch):
    """Seconds that the precision gate takes, for float16."""
    started = time.perf_counter()
    precision.check(net, batch, policy="mixed_float16")
    return time.perf_counter() - started


def measure(make, batch, repeats):
    """Decisions and first steps in turn, each on a new model."""
    samples = {"decide_seconds": [], "timed_seconds": [], "first_step_seconds": [], "overhead": [], "enabled": []}
    for _ in range(repeats):
        seconds, timed, decision = decide(make(), batch)
        first = first_step(make(), batch)
        row = (seconds, timed, first, (seconds - timed) / (2 * first), decision.enabled)
        for name, value in zip(samples, row, strict=True):
            samples[name].append(value)
    return samples


def main():
    """Measures, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of each measurement; default 5")
    options = parser.parse_args()
    document = harness.document(decisions={}, gate_seconds=[])
    nets = {
        "digits net, with dropout": (digits.conv_net, digits.batch(BATCH)),
        "dense net, without": (partial(dense_net, 0.0), dense_batch()),
        "dense net, with dropout": (partial(dense_net, 0.5), dense_batch()),
    }
    first_step(dense_net(0.0), dense_batch())  # TensorFlow's own start
    for _ in range(options.repeats):
        document["gate_seconds"].append(check(digits.conv_net(), digits.batch(BATCH)))
        harness.write(options.results, document)
    gate = document["gate_seconds"]
    print(f"precision.check, digits net: {statistics.median(gate):.2f} s [{min(gate):.2f}–{max(gate):.2f}]", flush=True)
    for name, (make, batch) in nets.items():
        samples = document["decisions"][name] = measure(make, batch, options.repeats)
        harness.write(options.results, document)
        overhead, enabled = samples["overhead"], sum(samples["enabled"])
        print(
            f"decide, {name}: {statistics.median(samples['decide_seconds']):.2f} s; beyond the timed steps "
            f"{statistics.median(overhead):.2f} [{min(overhead):.2f}–{max(overhead):.2f}] of two first steps with XLA; "
            f"on in {enabled} of {options.repeats}",
            flush=True,
        )


if __name__ == "__main__":
    main()
