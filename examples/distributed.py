"""Trains a small net on handwritten digits: the same script on one device, on several, and in several processes.

    python examples/distributed.py
    python examples/distributed.py --logical-devices 2
    python -m tfopt.distribute.launch -n 2 examples/distributed.py

Under a scheduler that sets TF_CONFIG, start it on each node. It needs scikit-learn: `pip install '.[bench]'`.
"""

import argparse
import sys

import tensorflow as tf

import tfopt

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--logical-devices", type=int, default=1, help="split the CPU to stand in for this many GPUs")
options = parser.parse_args()
if options.logical_devices > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    split = [tf.config.LogicalDeviceConfiguration()] * options.logical_devices
    tf.config.set_logical_device_configuration(cpu, split)

# Before TensorFlow does anything else: in a cluster, its server starts here.
strategy = tfopt.distribute.strategy("auto")
print(tfopt.distribute.explain())

import keras  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from sklearn.model_selection import train_test_split  # noqa: E402

digits = load_digits()
images = (digits.images / 16).astype("float32")
x, x_test, y, y_test = train_test_split(images, digits.target.astype("int32"), test_size=0.2, random_state=0)

keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, dtype="float32"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3, clipnorm=1.0), loss, metrics=["accuracy"])

# 64 is the global batch size: two replicas take 32 each, and the last batch splits unevenly.
model.fit(x, y, batch_size=64, epochs=10, verbose=2)
accuracy = model.evaluate(x_test, y_test, batch_size=64, verbose=0, return_dict=True)["accuracy"]
print(f"{strategy.num_replicas_in_sync} replicas: test accuracy {accuracy:.1%}")
model.save_weights(tfopt.distribute.own_path("digits.weights.h5"))
if accuracy <= 0.95:
    sys.exit("expected over 95 %")
