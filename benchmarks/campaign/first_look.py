"""Questions whose answers decide how tfopt feeds a GPU, each asked in a process of its own.

    python benchmarks/campaign/first_look.py QUESTION [--tiny]

Prints lines of JSON. --tiny takes sizes for a CPU.
"""

import functools
import json
import sys
import time

import keras
import numpy as np
import tensorflow as tf

from tfopt import fit, kernels, precision
from tfopt.bench.workloads import digits, photos
from tfopt.fit.launching import next_tensors
from tfopt.fit.overlapping import ahead
from tfopt.measure import FitTimer, StepTimer
from tfopt.measure.timers import wait
from tfopt.pipelines import build_pipeline

CHAINED = 8  # attentions in a call, so that a call's cost on the host does not hide theirs


def say(**values):
    """Prints one line of JSON."""
    print(json.dumps(values), flush=True)


def devices(tiny):
    """Where do constants lie, and how much host memory does the machine admit to?"""
    with open("/proc/meminfo") as file:
        memory = {line.split(":")[0]: int(line.split()[1]) // 1024 for line in file}
    say(
        zeros=tf.zeros(()).device,
        int32=tf.constant(1).device,
        host_total_mib=memory["MemTotal"],
        host_available_mib=memory["MemAvailable"],
    )


def attention(tiny):
    """What are flash attention's error and time, forward and backward, beside Keras' attention under XLA?"""
    shape = (1, 64, 1, 64) if tiny else (16, 1024, 12, 64)

    def flash(query, key, value):
        return kernels.dot_product_attention(query, key, value, causal=True)

    def plain(query, key, value):
        return keras.ops.dot_product_attention(query, key, value, is_causal=True)

    for dtype in ("bfloat16", "float16"):
        draws = [tf.random.stateless_normal(shape, (0, number)) for number in range(4)]
        operands = [tf.cast(draw, dtype) for draw in draws]
        graph = attention_step(flash, 1).get_concrete_function(*operands).graph
        taken = "XlaCallModule" in {operation.type for operation in graph.get_operations()}
        exact = attention_step(plain, 1)(*(tf.cast(operand[:1], "float64") for operand in operands))
        for name, attend in (("flash", flash), ("plain", plain)):
            found = attention_step(attend, 1)(*operands)
            largest = max(error(one[:1], other) for one, other in zip(found, exact, strict=True))
            ms = call_ms(attention_step(attend, CHAINED), operands, 2 if tiny else 20) / CHAINED
            say(attention=name, dtype=dtype, kernel_taken=taken and name == "flash", ms=round(ms, 4), error=largest)


def attention_step(attend, chained):
    """A compiled function of query, key, value and the output's gradient: the output and three gradients."""

    def step(query, key, value, upstream):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = query
            for _ in range(chained):
                output = attend(output, key, value)
        return [output, *tape.gradient(output, [query, key, value], output_gradients=upstream)]

    return tf.function(step, jit_compile=True, autograph=False)


def error(found, exact):
    """Root mean square of the difference, over that of the exact values."""
    return float(tf.norm(tf.cast(found, "float64") - exact) / tf.norm(exact))


def call_ms(function, operands, calls):
    """Milliseconds a call, with one wait at the end."""
    for _ in range(3):
        function(*operands)
    tf.test.experimental.sync_devices()
    started = time.perf_counter()
    for _ in range(calls):
        function(*operands)
    tf.test.experimental.sync_devices()
    return (time.perf_counter() - started) * 1000 / calls


def order(tiny):
    """Does copying batches ahead keep the order of a reshuffled dataset, in every epoch?"""
    stock, ahead = (labels_by_epoch(overlapped) for overlapped in (False, True))
    same = [bool((one == other).all()) for one, other in zip(stock, ahead, strict=True)]
    say(epochs_in_the_order_of_stock_fit=same, epochs_differ=bool((stock[0] != stock[1]).any()))


def labels_by_epoch(overlapped, examples=96, epochs=3):
    """The labels `fit` trains on, (epochs, examples)."""
    keras.utils.set_random_seed(0)
    seen = []

    class Noting(keras.Model):
        def train_step(self, data):
            seen.append(data[1].numpy())
            return {"loss": tf.constant(0.0)}

    inputs = keras.Input((8,))
    net = Noting(inputs, keras.layers.Dense(1)(inputs))
    net.compile("sgd", "mse", run_eagerly=True)
    if overlapped:
        fit.overlap(net)
    rows = np.zeros((examples, 8), "float32"), np.arange(examples)
    net.fit(tf.data.Dataset.from_tensor_slices(rows).shuffle(examples, seed=1).batch(16), epochs=epochs, verbose=0)
    return np.concatenate(seen).reshape(epochs, -1)


def int32(tiny):
    """Without XLA, do int32 labels make the host wait for the GPU in each step?"""
    width, size, steps = (64, 8, 12) if tiny else (4096, 8192, 60)
    for dtype in ("int32", "int64"):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(width, activation="relu") for _ in range(8)]
        net = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile("sgd", loss, jit_compile=False)
        fit.overlap(net)
        batch = np.zeros((size, 64), "float32"), np.zeros(size, dtype)
        data = tf.data.Dataset.from_tensors(batch).repeat(steps)
        net.fit(data, verbose=0)
        launches = Launches()
        started = time.perf_counter()
        net.fit(data, verbose=0, callbacks=[launches])
        step_ms = (time.perf_counter() - started) * 1000 / steps
        # Only the first: later launches wait for the bound on steps in flight.
        launch_ms = float(np.median(launches.ms[:6]))
        say(labels=dtype, step_ms=round(step_ms, 3), launch_ms=round(launch_ms, 3))


class Launches(keras.callbacks.Callback):
    """Times how long the host takes to launch each step."""

    def __init__(self):
        super().__init__()
        self.ms = []

    def on_train_batch_begin(self, batch, logs=None):
        self._started = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.ms.append((time.perf_counter() - self._started) * 1000)


def feeding(tiny):
    """How near to the resident batch does ResNet-50 come: whole batches gathered, map-and-batch, cache="device"?"""
    pixels, size, batches, steps = (32, 4, 12, 3) if tiny else (224, 256, 40, 25)
    random = np.random.default_rng(0)
    images = random.integers(256, size=(batches * size, pixels, pixels, 3), dtype=np.uint8)
    labels = random.integers(1000, size=batches * size).astype("int32")
    with precision.policy("mixed_bfloat16"):
        net = tiny_net(pixels) if tiny else photos.resnet50(jit_compile=True)
    alone = StepTimer(net, (images[:size], labels[:size]))
    ceiling = float(np.median([alone(steps, samples=1).median_ms for _ in range(3)]))
    say(way="ceiling", step_ms=round(ceiling, 3))
    fit.overlap(net)
    ways = {
        "gather": {"cache": None},
        "map and batch": {"cache": None, "transform": lambda image, label: (image, label)},
        "device cache": {"cache": "device"},
    }
    for way, options in ways.items():
        timer = FitTimer(net, build_pipeline((images, labels), batch_size=size, **options))
        samples = [timer(steps, warmup=min(8, batches - steps - 2), samples=1).median_ms for _ in range(3)]
        say(way=way, step_ms=[round(ms, 3) for ms in samples], of_ceiling=round(ceiling / float(np.median(samples)), 4))


def small_steps(tiny):
    """Where does the host's time go between steps of a perceptron, in an overlapped `fit` and in loops by hand?"""
    size, width, steps = (8, 16, 200) if tiny else (256, 512, 2000)
    random = np.random.default_rng(0)
    arrays = random.random((64, size, 784), "float32"), random.integers(10, size=(64, size))
    with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
        data = tf.data.Dataset.from_tensor_slices(arrays).prefetch(2).repeat()
    net = fit.overlap(digits.perceptron(width=width, jit_compile=True))
    net.fit(data, steps_per_epoch=steps, verbose=0)
    step = net.train_function  # whose parts are as they stand in `fit`
    copied = ahead(data, jit=True)
    resident = next_tensors(iter(copied), None)

    def loop(batches, launch):
        take = functools.partial(next_tensors, iter(batches), None) if batches else lambda: resident
        for _ in range(steps):
            launch(take())

    ways = {
        "batches of the host, not used": lambda: loop(data, len),
        "batches copied ahead, not used": lambda: loop(copied, len),
        "steps on one resident batch": lambda: loop(None, step._run),
        "loop by hand, copied as needed": lambda: loop(data, step._run),
        "loop by hand, copied ahead": lambda: loop(copied, step._run),
        "overlapped fit": lambda: net.fit(data, steps_per_epoch=steps, verbose=0, shuffle=False),
    }
    ms = {way: [] for way in ways}
    for _ in range(5):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            wait()
            ms[way].append(round((time.perf_counter() - started) * 1000 / steps, 4))
    for way, samples in ms.items():
        say(way=way, ms=samples[1:])


def tiny_net(pixels):
    """One convolution, which a CPU compiles at once."""
    layers = [keras.layers.Conv2D(4, 3), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(1000)]
    net = keras.Sequential([keras.Input((pixels, pixels, 3), dtype="uint8"), keras.layers.Rescaling(1 / 255), *layers])
    net.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    return net


QUESTIONS = {question.__name__: question for question in (devices, attention, order, int32, small_steps, feeding)}

if __name__ == "__main__":
    QUESTIONS[sys.argv[1]]("--tiny" in sys.argv)
