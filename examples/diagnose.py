"""A training script like many others, with several things in it that slow it down. `tfopt-bench doctor` finds them.

    tfopt-bench doctor examples/diagnose.py

times what the script's fit would train, changes nothing, and takes a minute on two cores. docs/diagnosis.md shows what
it prints. Run as it is, `python examples/diagnose.py` trains.
"""

import keras
import numpy as np
import tensorflow as tf

PHOTOS, CLASSES = 768, 10


def jpegs(labels):
    """A noisy picture for each label, darker or brighter."""
    rng = np.random.default_rng(0)
    for label in labels:
        picture = 20 * label + rng.integers(64, size=(240, 320, 3))
        yield tf.io.encode_jpeg(picture.astype("uint8")).numpy()


def decode(jpeg, label):
    return tf.image.resize(tf.io.decode_jpeg(jpeg, channels=3), (64, 64)) / 255, label


class WeightHistograms(keras.callbacks.Callback):
    """Keeps a histogram of all weights after each batch."""

    def on_train_begin(self, logs=None):
        self.histograms = []

    def on_train_batch_end(self, batch, logs=None):
        weights = np.concatenate([weight.ravel() for weight in self.model.get_weights()])
        self.histograms.append(np.histogram(weights, 64))


labels = np.arange(PHOTOS) % CLASSES
dataset = tf.data.Dataset.from_tensor_slices((list(jpegs(labels)), labels))
test = dataset.take(128).map(decode).batch(32)
train = dataset.skip(128).shuffle(640).map(decode).batch(32)

model = keras.Sequential(
    [
        keras.Input((64, 64, 3)),
        keras.layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(CLASSES),
    ]
)
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.fit(train, epochs=3, validation_data=test, callbacks=[WeightHistograms()])
