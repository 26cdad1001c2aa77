"""What `tfopt.memory.estimate` says of a training step, beside what that step takes when it runs.

    python benchmarks/memory_estimate.py [RESULTS.json] [--only NET ...]

Each net is estimated and then trained by `train_on_batch`, in a process of its own, with XLA and without. Under XLA
what it takes is read from the compiler's dump of the step it trained with: all allocations of the buffer assignment
that are not one thread's own (arguments, results, temporaries, constants; new values of variables replace the old
ones in place). Without XLA it is what the step's tensors ask of TensorFlow's allocator at their peak, as the profiler
records it, beside variables and batch. `allocator_mib` is the peak that the allocator itself counts, its gaps
included: on a GPU `tf.config.experimental.get_memory_info("GPU:0")["peak"]`, and on a CPU the same of the BFC
allocator, switched on here.
"""

import glob
import importlib.util
import os
import re
import statistics
import tempfile
from pathlib import Path
from unittest import mock

import harness
import keras
import numpy as np
import tensorflow as tf

from tfopt import memory
from tfopt.bench import isolated

layers = keras.layers
STEPS = 3  # the first compiles, and variables find their place; the last one is looked at
PROFILED = 5  # steps; on a CPU, threads run their operations in another order each time
CPU_POOL_MIB = 16_384  # reserved, not touched
LIMIT_SECONDS = 900.0


def convnet(size):
    net = keras.Sequential([keras.Input((32, 32, 3))])
    for width in (32, 64, 64):
        net.add(layers.Conv2D(width, 3, padding="same", activation="relu"))
        net.add(layers.BatchNormalization())
        net.add(layers.MaxPooling2D())
    for layer in (layers.Flatten(), layers.Dropout(0.3), layers.Dense(128, activation="relu"), layers.Dense(10)):
        net.add(layer)
    return net, "adam", ((64 * size, 32, 32, 3), "float32"), ((64 * size,), 10)


def mobilenet(size):
    net = keras.applications.MobileNetV2((96, 96, 3), weights=None, classes=10, classifier_activation=None)
    return net, "adam", ((16 * size, 96, 96, 3), "float32"), ((16 * size,), 10)


def residual(size):
    image = x = keras.Input((64, 64, 3))
    x = layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False)(x)
    for width in (32, 64, 128):
        for _ in range(2):
            y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(x)))
            y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(y))
            x = x if x.shape[-1] == width else layers.Conv2D(width, 1, use_bias=False)(x)
            x = layers.ReLU()(layers.Add()([x, y]))
        x = layers.MaxPooling2D()(x)
    net = keras.Model(image, layers.Dense(10, dtype="float32")(layers.GlobalAveragePooling2D()(x)))
    return net, keras.optimizers.SGD(0.1, momentum=0.9), ((32 * size, 64, 64, 3), "float32"), ((32 * size,), 10)


def unet(size):
    def block(x, width):
        for _ in range(2):
            x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        return x

    image = x = keras.Input((64, 64, 3))
    skipped = []
    for width in (16, 32, 64):
        x = block(x, width)
        skipped.append(x)
        x = layers.MaxPooling2D()(x)
    x = block(x, 128)
    for width in (64, 32, 16):
        x = layers.Conv2DTranspose(width, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skipped.pop()]), width)
    net = keras.Model(image, layers.Conv2D(3, 1)(x))
    return net, "adam", ((8 * size, 64, 64, 3), "float32"), ((8 * size, 64, 64), 3)


def transformer(*, length, width, vocabulary, blocks, causal):
    tokens = keras.Input((length,), dtype="int32")
    x = layers.Embedding(vocabulary, width)(tokens)
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(4, width // 4, dropout=0.1)(y, y, use_causal_mask=causal)
        x = layers.Add()([x, layers.Dropout(0.1)(y)])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(y))])
    return tokens, layers.LayerNormalization()(x)


def encoder(size, optimizer="adamw"):
    tokens, x = transformer(length=64, width=128, vocabulary=2000, blocks=3, causal=False)
    net = keras.Model(tokens, keras.layers.Dense(5)(keras.layers.GlobalAveragePooling1D()(x)))
    return net, optimizer, ((16 * size, 64), 2000), ((16 * size,), 5)


def decoder(size):
    tokens, x = transformer(length=128, width=128, vocabulary=4000, blocks=2, causal=True)
    net = keras.Model(tokens, keras.layers.Dense(4000)(x))
    return net, "adam", ((8 * size, 128), 4000), ((8 * size, 128), 4000)


def lstm(size):
    stack = [layers.Embedding(1000, 64), layers.LSTM(128, return_sequences=True), layers.LSTM(128), layers.Dense(5)]
    net = keras.Sequential([keras.Input((50,), dtype="int32"), *stack])
    return net, "rmsprop", ((32 * size, 50), 1000), ((32 * size,), 5)


def gpt2(size):
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=2000, num_layers=3, num_heads=4, hidden_dim=128, intermediate_dim=512, max_sequence_length=64
    )
    net = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    parts = {"token_ids": ((8 * size, 64), 2000), "padding_mask": ((8 * size, 64), 2)}
    return net, "adam", parts, ((8 * size, 64), 2000)


def mixed(size):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        net, _, x, y = residual(size)
    finally:
        keras.config.set_dtype_policy(before)
    return net, "adam", x, y


def accumulating(size):
    return encoder(size, keras.optimizers.Adam(1e-3, gradient_accumulation_steps=4))


NETS = {
    "convolutional net": convnet,
    "MobileNetV2": mobilenet,
    "U-Net": unet,
    "transformer encoder": encoder,
    "transformer decoder": decoder,
    "LSTM": lstm,
    "GPT-2 of KerasHub": gpt2,
    "residual net, mixed_float16": mixed,
    "encoder, gradient accumulation": accumulating,
}


def array(part):
    """Random numbers of a shape, below a limit if they are integers."""
    if isinstance(part, dict):
        return {name: array(one) for name, one in part.items()}
    shape, kind = part
    draws = np.random.default_rng(0)
    return draws.standard_normal(shape, "float32") if kind == "float32" else draws.integers(0, kind, shape, "int32")


def assigned_mib(folder):
    """The MiB of the largest buffer assignment that XLA has dumped there."""
    found = []
    for path in glob.glob(f"{folder}/*buffer-assignment.txt"):
        blocks = re.findall(r"^allocation \d+: size (\d+),(.*)$", Path(path).read_text(), re.MULTILINE)
        found.append(sum(int(size) for size, notes in blocks if "thread-local" not in notes))
    return max(found) / 2**20


def asked_mib(folder, allocator):
    """The MiB that tensors asked of an allocator at their peak, beyond those there before the profile began."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    events = []
    for plane in xplane_pb2.XSpace.FromString(Path(path).read_bytes()).planes:
        names = {number: one.name for number, one in plane.event_metadata.items()}
        notes = {number: one.name for number, one in plane.stat_metadata.items()}
        for line in plane.lines:
            for event in line.events:
                if names[event.metadata_id].startswith("Memory"):
                    stats = {notes[one.metadata_id]: getattr(one, one.WhichOneof("value")) for one in event.stats}
                    name = stats["allocator_name"]  # a text, or the number of a note that holds it
                    if not notes.get(name, str(name)).startswith(allocator):
                        continue
                    at = line.timestamp_ns * 1000 + event.offset_ps
                    events.append((at, names[event.metadata_id] == "MemoryAllocation", stats))
    held, now, most = {}, 0, 0
    for _, made, stats in sorted(events, key=lambda event: event[0]):
        address = stats["addr"]
        if made:
            held[address] = stats["requested_bytes"]
            now += held[address]
        else:  # what was there before, such as a variable that got a new value
            now -= held.pop(address, stats["requested_bytes"])
        most = max(most, now)
    return most / 2**20


def measure(send, name, jit_compile, dumps):
    """Estimates a net and trains it; returns both as JSON values."""
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    device = "GPU:0" if on_gpu else "CPU:0"
    if not on_gpu:  # so that the pool does not grow in leaps
        pool = tf.raw_ops.Empty(shape=[CPU_POOL_MIB // 2, 2**18], dtype="float32", init=False)
        del pool
    net, optimizer, x, y = NETS[name](8 if on_gpu else 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    batch = array(x), array(y)
    estimate = memory.estimate(net, batch)
    for path in glob.glob(f"{dumps}/*"):
        os.remove(path)
    held_mib = estimate.weights_mib + estimate.optimizer_mib + estimate.batch_mib
    for _ in range(STEPS):
        tf.config.experimental.reset_memory_stats(device)
        net.train_on_batch(*batch)
    taken = {"allocator_mib": tf.config.experimental.get_memory_info(device)["peak"] / 2**20}
    if jit_compile:
        taken["mib"] = assigned_mib(dumps)
    else:
        taken["each_mib"] = []
        for step in range(PROFILED):
            with tf.profiler.experimental.Profile(f"{dumps}/{step}"):
                net.train_on_batch(*batch)
            taken["each_mib"].append(held_mib + asked_mib(f"{dumps}/{step}", "GPU_0" if on_gpu else "bfc_cpu"))
        taken["mib"] = statistics.median(taken["each_mib"])
    return {"estimate": estimate.to_dict(), "taken": taken}


def compared(name, jit_compile):
    """What was estimated and what was taken, from a process of its own."""
    with tempfile.TemporaryDirectory() as dumps:
        variables = {
            "XLA_FLAGS": f"--xla_dump_to={dumps} --xla_dump_hlo_as_text",
            "TF_CPU_ALLOCATOR_USE_BFC": "1",
            "TF_CPU_BFC_MEM_LIMIT_IN_MB": str(CPU_POOL_MIB),
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
        with mock.patch.dict(os.environ, variables):
            found = isolated.call(measure, name, jit_compile, dumps, seconds=LIMIT_SECONDS)
    return found | {"off_by": found["estimate"]["total_mib"] / found["taken"]["mib"] - 1}


def main():
    """Compares all nets and reports."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=NETS, default=NETS, metavar="NET", help="only these")
    options = parser.parse_args()
    figures = {}
    for name in options.only:
        if NETS[name] is gpt2 and importlib.util.find_spec("keras_hub") is None:
            print(f"{name}: left out, keras_hub is not installed")
            continue
        figures[name] = {way: compared(name, way == "XLA") for way in ("XLA", "graph")}
        for way, found in figures[name].items():
            taken = found["taken"]
            print(
                f"{name:30} {way:5} estimated {found['estimate']['total_mib']:8.1f} MiB, taken {taken['mib']:8.1f} "
                f"({found['off_by']:+.1%}), by the allocator {taken['allocator_mib']:8.1f}",
                flush=True,
            )
    harness.write(options.results, harness.document(figures=figures))


if __name__ == "__main__":
    main()
