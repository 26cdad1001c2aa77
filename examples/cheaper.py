"""Makes a net cheaper: what its layers cost, half of its channels cut, and a tenth of the training to recover.

Run it as it is: `python examples/cheaper.py`. It needs scikit-learn, and takes a minute on two cores.
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfopt

EPOCHS, BATCH = 20, 32
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
order = np.random.default_rng(0).permutation(len(images))
train, test = ((images[part], labels[part]) for part in (order[:1400], order[1400:]))
batches = tf.data.Dataset.from_tensor_slices(train).shuffle(len(order), seed=0).batch(BATCH)


def normalized(x, width, size, strides=1):
    """A convolution and batch norm."""
    x = keras.layers.Conv2D(width, size, strides, padding="same", use_bias=False)(x)
    return keras.layers.BatchNormalization(momentum=0.9)(x)


def compiled(net, epochs, rate):
    """Compiles the net with a learning rate that falls to 0."""
    rates = keras.optimizers.schedules.CosineDecay(rate, epochs * len(batches))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(rates), loss, metrics=["accuracy"])
    return net


def resnet():
    """Three residual blocks."""
    layers = keras.layers
    inputs = keras.Input((8, 8, 1))
    x = layers.ReLU()(normalized(inputs, 32, 3))
    for width, strides in ((32, 1), (64, 2), (64, 1)):
        inner = layers.ReLU()(normalized(x, width, 3, strides))
        around = x if strides == 1 else normalized(x, width, 1, strides)
        x = layers.ReLU()(layers.Add()([normalized(inner, width, 3), around]))
    outputs = layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs, name="resnet")


keras.utils.set_random_seed(0)
model = compiled(resnet(), EPOCHS, rate=1e-3)
model.fit(batches, epochs=EPOCHS, verbose=0)

# What do its layers cost in training?
print(tfopt.compress.cost(model, batches))

# Cut half of its channels.
pruned = tfopt.compress.prune(model, batches, 0.5)
print(pruned)

# Train it for a tenth of the epochs, with the whole net as its teacher.
student = compiled(pruned.model, EPOCHS // 10, rate=3e-3)
tfopt.compress.distil(model, student, batches)
student.fit(batches, epochs=EPOCHS // 10, verbose=0)

accuracies = [net.evaluate(*test, verbose=0, return_dict=True)["accuracy"] for net in (model, student)]
print("Test accuracy: {:.1%}; pruned and trained for a tenth of the epochs: {:.1%}".format(*accuracies))
