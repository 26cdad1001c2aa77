"""Trains on a folder of JPEG photographs: random crops for training, central ones for evaluation, cached on disk.

Run it as it is: `python examples/photos.py [FOLDER]`. The folder has one subfolder per class; without one, it uses
tfopt-bench's photographs, cut from two of scikit-learn's: `pip install '.[bench]'`.
"""

import sys
import tempfile

import keras
import tensorflow as tf

from tfopt.callbacks import ThroughputLogger
from tfopt.pipelines import CentralCrop, RandomCrop, images, plan_pipeline, profile_pipeline

if len(sys.argv) > 1:
    folder = sys.argv[1]
else:
    from tfopt.bench.workloads import photos

    folder = photos.folder(256)
SIZE = 96


def flip(image, label, seed):
    return tf.image.stateless_random_flip_left_right(image, seed), label


source = images(folder)
train = plan_pipeline(source, batch_size=32, crop=RandomCrop(SIZE), augment=flip, cache=None, seed=0)
print(train)

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((SIZE, SIZE, 3), dtype="uint8"),
        keras.layers.Rescaling(1 / 127.5, offset=-1),  # on the device: the pipeline keeps bytes
        keras.layers.Conv2D(16, 5, strides=3, activation="relu"),
        keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(len(source.class_names)),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])

with tempfile.TemporaryDirectory() as caches:  # use a permanent folder to keep the cache for later runs
    evaluation = plan_pipeline(source, batch_size=32, crop=CentralCrop(SIZE), training=False, cache=caches)
    print(evaluation)
    model.fit(
        train.build(),
        epochs=4,
        validation_data=evaluation.build(),
        callbacks=[ThroughputLogger()],
        verbose=2,
    )

# Which stage limits the input?
print(profile_pipeline(train, seconds=3))
