"""Healthy nets of images, with data that they can learn."""

import keras
import numpy as np

from precision_matrix.nets import ROWS, compiled, of_rows, random

layers = keras.layers


def images(size=16, channels=3, classes=4):
    """Noise with a bright square, in the quarter that is the class."""
    x = 0.3 * random().normal(size=(ROWS, size, size, channels)).astype("float32")
    y = random(1).integers(classes, size=ROWS).astype("int32")
    half = size // 2
    for image, quarter in zip(x, y, strict=True):
        row, column = quarter // 2 * half, quarter % 2 * half
        image[row : row + half, column : column + half] += 1.0
    return x, y


def of_images(body, data=None, **options):
    return of_rows(lambda x: layers.GlobalAveragePooling2D()(body(x)), data or images(), classes=4, **options)


def conv_net():
    def body(x):
        for filters in (8, 16):
            x = layers.MaxPooling2D()(layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3)(x))))
        return x

    return of_images(body)


def residual_net():
    """Its branches begin at zero, as the scale of their last batch norm does."""

    def body(x):
        x = layers.Conv2D(8, 3, padding="same")(x)
        for _ in range(4):
            y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same")(x)))
            y = layers.BatchNormalization(gamma_initializer="zeros")(layers.Conv2D(8, 3, padding="same")(y))
            x = layers.ReLU()(x + y)
        return x

    return of_images(body)


def depthwise_net():
    def body(x):
        for _ in range(2):
            y = layers.DepthwiseConv2D(3, padding="same")(layers.Conv2D(12, 1, activation="relu6")(x))
            gate = layers.Dense(12, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(y))
            x = layers.Conv2D(8, 1)(y * gate)
        return layers.SeparableConv2D(8, 3)(x)

    return of_images(body)


def normalisations():
    def body(x):
        x = layers.GroupNormalization(4)(layers.Conv2D(8, 3)(x))
        x = layers.RMSNormalization()(layers.SpectralNormalization(layers.Conv2D(8, 3))(x))
        return layers.UnitNormalization()(layers.LayerNormalization()(x))

    return of_images(body)


def bytes_as_images():
    """Whole numbers up to 255, scaled inside of the model."""
    x, y = images()
    x = np.clip(x * 60 + 80, 0, 255).astype("uint8")
    return of_images(lambda x: layers.Conv2D(8, 3, activation="relu")(layers.Rescaling(1 / 127.5, -1)(x)), (x, y))


def bright_images():
    """Floats up to 255, that go into the convolution as they are."""
    x, y = images()
    return of_images(lambda x: layers.Conv2D(8, 3, activation="relu")(x), (np.clip(x * 60 + 80, 0, 255).round(), y))


def augmented():
    def body(x):
        for layer in (
            layers.RandomFlip(),
            layers.RandomRotation(0.02),
            layers.RandomZoom(0.1),
            layers.RandomTranslation(0.05, 0.05),
            layers.RandomContrast(0.1),
            layers.RandomBrightness(0.1, value_range=(0, 1)),
        ):
            x = layer(x)
        return layers.Conv2D(8, 3, activation="relu")(x)

    return of_images(body)


def augmented_colours():
    def body(x):
        x = layers.RandomHue(0.1, value_range=(0, 1))(x)
        x = layers.RandomSaturation(0.5, value_range=(0, 1))(x)
        return layers.Conv2D(8, 3, activation="relu")(layers.RandomCrop(12, 12)(layers.Resizing(14, 14)(x)))

    x, y = images()
    return of_images(body, (np.clip(x * 0.3 + 0.3, 0, 1), y))


def unet():
    x, _ = images(channels=1)
    inputs = keras.Input(x.shape[1:])
    one = layers.Conv2D(8, 3, padding="same", activation="relu")(inputs)
    two = layers.Conv2D(16, 3, padding="same", activation="relu")(layers.MaxPooling2D()(one))
    up = layers.Concatenate()([one, layers.Conv2DTranspose(8, 2, strides=2)(two)])
    up = layers.Concatenate()([up, layers.UpSampling2D(interpolation="bilinear")(two)])
    outputs = layers.Conv2D(1, 1, name="head")(layers.Conv2D(8, 3, padding="same", activation="relu")(up))
    return compiled(inputs, outputs, keras.losses.BinaryCrossentropy(from_logits=True)), (x, (x > 0.5).astype("int32"))


def frozen_backbone():
    def body(x):
        for at in range(3):
            x = layers.Conv2D(8, 3, padding="same", activation="relu", trainable=False, name=f"frozen_{at}")(x)
            x = layers.BatchNormalization(trainable=False)(x)
        return x

    return of_images(body)


HEALTHY = (
    conv_net, residual_net, depthwise_net, normalisations, bytes_as_images, bright_images, augmented,
    augmented_colours, unet, frozen_backbone,
)  # fmt: skip
