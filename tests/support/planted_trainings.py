"""Trainings with one planted cause each, written as users write them; `mended` follows the remedy that is named.

Each function returns a compiled model and the arguments of its `fit`.
"""

import json
import os
import tempfile
import time

import keras
import numpy as np
import tensorflow as tf

_layers = keras.layers
RANDOM = np.random.default_rng(0)


def _rows(count, features=64, classes=10):
    return RANDOM.normal(size=(count, features)).astype("float32"), RANDOM.integers(0, classes, count)


def _dense(*units, features=64, classes=10, policy=None, **compile_arguments):
    hidden = (_layers.Dense(n, activation="relu", dtype=policy) for n in units)
    model = keras.Sequential([keras.Input((features,)), *hidden, _layers.Dense(classes)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam", "loss": loss, "metrics": ["accuracy"]} | compile_arguments)
    return model


def _convolutions(**compile_arguments):
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(_layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)),
            _layers.GlobalAveragePooling2D(),
            _layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, **compile_arguments)
    return model


def _images(count, size=32):
    return RANDOM.random((count, size, size, 3), dtype=np.float32), RANDOM.integers(0, 10, count)


# input


def files_read_one_by_one(mended):
    x, y = _rows(2048)

    def read(row):  # as from a network share
        time.sleep(0.002)
        return row

    def load(row, label):
        return tf.ensure_shape(tf.numpy_function(read, [row], tf.float32), (64,)), label

    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    dataset = dataset.map(load, num_parallel_calls=64 if mended else None).batch(32)
    return _dense(128), {"x": dataset.prefetch(tf.data.AUTOTUNE) if mended else dataset, "epochs": 2}


class _SlowImages(keras.utils.PyDataset):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = _images(960)

    def __len__(self):
        return 60

    def __getitem__(self, number):
        time.sleep(0.06)
        return self.x[16 * number : 16 * number + 16], self.y[16 * number : 16 * number + 16]


def py_dataset_without_workers(mended):
    return _convolutions(), {"x": _SlowImages(workers=12, max_queue_size=24) if mended else _SlowImages()}


# no prefetch


def _read_by_turns(mended, batches, seconds, inject=False, autotune=True):
    """Batches that take about as long to read as to train on, where TensorFlow's own prefetching is off."""
    x, y = _rows(64 * batches, features=1024)

    def read():
        for begin in range(0, len(x), 64):
            time.sleep(seconds)
            yield x[begin : begin + 64], y[begin : begin + 64]

    signature = tf.TensorSpec((64, 1024), tf.float32), tf.TensorSpec((64,), tf.int64)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = inject
    options.autotune.enabled = autotune
    dataset = tf.data.Dataset.from_generator(read, output_signature=signature).with_options(options)
    return dataset.prefetch(2) if mended else dataset


def batches_from_a_slow_disk(mended):
    dataset = _read_by_turns(mended, batches=100, seconds=0.02)
    return _dense(1024, 1024, features=1024), {"x": dataset, "steps_per_epoch": 100}


def batches_from_a_database(mended):
    dataset = _read_by_turns(mended, batches=60, seconds=0.05, inject=True, autotune=False)
    return _dense(2048, 2048, features=1024), {"x": dataset.repeat(), "steps_per_epoch": 60}


# callbacks at every step


class _LogWriter(keras.callbacks.Callback):
    def __init__(self, every):
        super().__init__()
        self.every = every
        self.written = tempfile.mkstemp(suffix=".jsonl")[1]

    def on_train_batch_end(self, batch, logs=None):
        if batch % self.every:
            return
        norms = [float(np.linalg.norm(weight)) for weight in self.model.get_weights()]
        with open(self.written, "a") as file:
            json.dump(norms, file)
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.005)  # a share on the network


def log_written_on_every_step(mended):
    x, y = _rows(4096)
    return _dense(128), {"x": x, "y": y, "callbacks": [_LogWriter(every=100 if mended else 1)]}


class _Preview(keras.callbacks.Callback):
    def __init__(self, x, every):
        super().__init__()
        self.x, self.every = x, every

    def on_train_batch_end(self, batch, logs=None):
        if batch % self.every == 0:
            self.model.predict(self.x, verbose=0)


def prediction_on_every_step(mended):
    x, y = _rows(4096)
    return _dense(128), {"x": x, "y": y, "callbacks": [_Preview(x[:32], every=100 if mended else 1)]}


# fit waits for each step


def tiny_steps(mended):
    x, y = _rows(4096)
    model = _dense(8)
    return _overlapped(model, mended), {"x": x, "y": y, "batch_size": 32}


def tiny_steps_with_many_metrics(mended):
    x, y = _rows(4096)
    metrics = ["accuracy", *(keras.metrics.SparseTopKCategoricalAccuracy(k, name=f"top{k}") for k in (2, 3, 4, 5))]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(32).cache().prefetch(2)
    return _overlapped(_dense(8, metrics=metrics), mended), {"x": dataset}


def _overlapped(model, mended):
    import tfopt

    return tfopt.fit.overlap(model) if mended else model


# validation


def validation_larger_than_training(mended):
    x, y = _rows(20000)
    return _dense(128), {
        "x": x[:2000],
        "y": y[:2000],
        "validation_data": (x, y),
        "validation_freq": 5 if mended else 1,
        "epochs": 5,
    }


def validation_from_a_slow_pipeline(mended):
    x, y = _images(640)

    def read(image):
        time.sleep(0.02)
        return image

    def load(image, label):
        return tf.ensure_shape(tf.numpy_function(read, [image], tf.float32), (16, 32, 32, 3)), label

    validation = tf.data.Dataset.from_tensor_slices((x, y)).batch(16).map(load)
    return _convolutions(), {
        "x": x,
        "y": y,
        "batch_size": 16,
        "validation_data": validation,
        "validation_freq": 5 if mended else 1,
        "epochs": 5,
    }


# the ends of epochs


def large_checkpoint_every_epoch(mended):
    texts, labels = RANDOM.integers(0, 200_000, (1600, 8)), RANDOM.integers(0, 2, (1600, 1))
    words = _layers.Embedding(200_000, 128, trainable=False)  # as of vectors that were trained before
    model = keras.Sequential([keras.Input((8,)), words, _layers.GlobalAveragePooling1D(), _layers.Dense(1)])
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True))
    path = os.path.join(tempfile.mkdtemp(), "last.keras")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_freq=250 if mended else "epoch")
    return model, {"x": texts, "y": labels, "epochs": 5, "callbacks": [checkpoint]}


class _Upload(keras.callbacks.Callback):
    def __init__(self, every):
        super().__init__()
        self.every = every

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every == 0:
            time.sleep(0.6)


def upload_after_every_epoch(mended):
    x, y = _rows(1600)
    return _dense(64), {"x": x, "y": y, "epochs": 5, "callbacks": [_Upload(every=5 if mended else 1)]}


# new shapes


def sentences_of_any_length(mended):
    lengths = [int(n) for n in RANDOM.permutation(np.arange(9, 73))]
    texts = [RANDOM.integers(1, 500, (16, n)) for n in lengths]
    labels = [RANDOM.integers(0, 2, 16) for _ in lengths]
    if mended:
        texts = [np.pad(text, ((0, 0), (0, 72 - text.shape[1]))) for text in texts]
    signature = tf.TensorSpec((16, 72 if mended else None), tf.int64), tf.TensorSpec((16,), tf.int64)
    dataset = tf.data.Dataset.from_generator(lambda: zip(texts, labels, strict=True), output_signature=signature)
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            _layers.Embedding(500, 16),
            _layers.GlobalAveragePooling1D(),
            _layers.Dense(1),
        ]
    )
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=True)
    return model, {"x": dataset, "steps_per_epoch": 64}


def images_of_any_size(mended):
    sizes = [int(n) for n in RANDOM.permutation(np.arange(16, 64))]
    images = [RANDOM.random((8, 64 if mended else n, 64 if mended else n, 3), dtype=np.float32) for n in sizes]
    labels = [RANDOM.integers(0, 10, 8) for _ in sizes]
    side = 64 if mended else None
    signature = tf.TensorSpec((8, side, side, 3), tf.float32), tf.TensorSpec((8,), tf.int64)
    dataset = tf.data.Dataset.from_generator(lambda: zip(images, labels, strict=True), output_signature=signature)
    model = keras.Sequential(
        [
            keras.Input((None, None, 3)),
            _layers.Dense(8, activation="relu"),
            _layers.GlobalAveragePooling2D(),
            _layers.Dense(10),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=True)
    return model, {"x": dataset, "steps_per_epoch": 48}


# XLA is off


@keras.saving.register_keras_serializable("planted")
class _Elementwise(_layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        for _ in range(12):
            x = keras.ops.tanh(x * self.scale + 0.1) + 0.5 * keras.ops.sigmoid(x) * x
        return x


def many_small_operations(mended):
    x = RANDOM.normal(size=(2048, 2048)).astype("float32")
    model = keras.Sequential([keras.Input((2048,)), _Elementwise()])
    model.compile("sgd", "mse", jit_compile=mended)
    return model, {"x": x, "y": x, "batch_size": 64}


def small_transformer(mended):
    texts, labels = RANDOM.integers(0, 500, (64 * 60, 32)), RANDOM.integers(0, 2, (64 * 60, 1))
    tokens = keras.Input((32,), dtype="int32")
    x = _layers.Embedding(500, 64)(tokens)
    for _ in range(3):
        x = _layers.LayerNormalization()(x + _layers.MultiHeadAttention(4, 16)(x, x))
        x = _layers.LayerNormalization()(x + _layers.Dense(64)(_layers.Dense(64, activation="gelu")(x)))
    model = keras.Model(tokens, _layers.Dense(1)(_layers.GlobalAveragePooling1D()(x)))
    model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), jit_compile=mended)
    return model, {"x": texts, "y": labels, "batch_size": 64}


# XLA does not pay


def convolutions_under_xla(mended):
    x, y = _images(1280)
    return _convolutions(jit_compile=not mended), {"x": x, "y": y, "batch_size": 64}


def depthwise_convolutions_under_xla(mended):
    x, y = _images(640)
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            _layers.SeparableConv2D(32, 3, activation="relu"),
            _layers.SeparableConv2D(32, 3, activation="relu"),
            _layers.GlobalAveragePooling2D(),
            _layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=not mended)
    return model, {"x": x, "y": y, "batch_size": 16}


# 16 bits do not pay


def float16_on_a_cpu(mended):
    x, y = _rows(2048, features=256)
    return _dense(256, 256, features=256, policy="float32" if mended else "mixed_float16"), {"x": x, "y": y}


def wide_layers_in_float16(mended):
    x, y = _rows(1024, features=512)
    return _dense(1024, features=512, policy="float32" if mended else "mixed_float16"), {"x": x, "y": y}


# eager execution


def eager_left_on(mended):
    x, y = _rows(640)
    return _dense(64, 64, run_eagerly=not mended), {"x": x, "y": y}


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = _layers.Dense(64, activation="relu"), _layers.Dense(10)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def own_step_debugged(mended):
    x, y = _rows(640)
    model = OwnStep()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, run_eagerly=not mended)
    return model, {"x": x, "y": y}


# a small batch


def one_example_at_a_time(mended):
    x, y = _rows(96, features=1024)
    return _dense(2048, 2048, features=1024, jit_compile=True), {"x": x, "y": y, "batch_size": 2 if mended else 1}


def batch_of_four(mended):
    x, y = _rows(256, features=512)
    return _dense(2048, 2048, features=512), {"x": x, "y": y, "batch_size": 8 if mended else 4}


# nothing


def large_products(mended):
    x, y = _rows(20 * 2048, features=1024)
    return _dense(1024, 1024, features=1024, optimizer="sgd"), {"x": x, "y": y, "batch_size": 2048, "verbose": 0}


def large_convolutions(mended):
    x, y = _images(20 * 32)
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            *(_layers.Conv2D(64, 3, padding="same", activation="relu") for _ in range(4)),
            _layers.GlobalAveragePooling2D(),
            _layers.Dense(10),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, {"x": x, "y": y, "verbose": 0}


PLANTED = {
    "input": (files_read_one_by_one, py_dataset_without_workers),
    "no prefetch": (batches_from_a_slow_disk, batches_from_a_database),
    "callback": (log_written_on_every_step, prediction_on_every_step),
    "fit waits for each step": (tiny_steps, tiny_steps_with_many_metrics),
    "validation": (validation_larger_than_training, validation_from_a_slow_pipeline),
    "between epochs": (large_checkpoint_every_epoch, upload_after_every_epoch),
    "new shapes": (sentences_of_any_length, images_of_any_size),
    "XLA is off": (many_small_operations, small_transformer),
    "XLA does not pay": (convolutions_under_xla, depthwise_convolutions_under_xla),
    "16 bits do not pay": (float16_on_a_cpu, wide_layers_in_float16),
    "eager execution": (eager_left_on, own_step_debugged),
    "small batch": (one_example_at_a_time, batch_of_four),
    "nothing": (large_products, large_convolutions),
}
"""Two trainings by what the name of their most expensive cause contains; the last two have nothing worth changing."""
