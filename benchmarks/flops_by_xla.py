"""FLOPs of ten models' forward pass by XLA's own cost analysis, for the test that tfopt.compress counts the same.

    pip install jax keras
    python benchmarks/flops_by_xla.py [RESULTS.json]

TensorFlow does not hand out XLA's cost analysis, JAX does: the same Keras models run on its backend. XLA counts what
tfopt counts, the products and convolutions, with two differences: it leaves out what a convolution multiplies with
padding, and adds element-wise work, which is less than 2 % in these models.
"""

import os
import platform
from importlib import metadata

import harness

BATCH = 2
_LABELS = 1000


def application(name, side=224):
    """A model of keras.applications, without weights, and the shape of its inputs."""
    import keras

    return getattr(keras.applications, name)(weights=None), (BATCH, side, side, 3)


def perceptron():
    """Three dense layers."""
    import keras

    layers = keras.layers
    stack = [keras.Input((784,)), layers.Dense(512, activation="relu"), layers.Dense(512, activation="relu")]
    return keras.Sequential([*stack, layers.Dense(10)]), (BATCH, 784)


def unet():
    """A U-Net of one level, with a transposed convolution."""
    import keras

    layers = keras.layers
    inputs = keras.Input((64, 64, 3))
    high = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    low = layers.Conv2D(64, 3, padding="same", activation="relu")(layers.MaxPooling2D()(high))
    joined = layers.Concatenate()([high, layers.Conv2DTranspose(32, 2, strides=2, padding="same")(low)])
    joined = layers.Conv2D(32, 3, padding="same", activation="relu")(joined)
    return keras.Model(inputs, layers.Conv2D(4, 1)(joined)), (BATCH, 64, 64, 3)


def decoder(width=1024, length=256):
    """Two blocks of a language model's decoder and its head, on vectors."""
    import keras

    layers = keras.layers
    inputs = x = keras.Input((length, width))
    for _ in range(2):
        normal = layers.LayerNormalization()(x)
        x = layers.Add()([x, layers.MultiHeadAttention(8, width // 8)(normal, normal, use_causal_mask=True)])
        inner = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(inner)])
    return keras.Model(inputs, layers.Dense(_LABELS)(x)), (BATCH, length, width)


MODELS = {
    "perceptron": perceptron,
    "U-Net": unet,
    "decoder": decoder,
    "MobileNet": lambda: application("MobileNet"),
    "ResNet50": lambda: application("ResNet50"),
    "ResNet101V2": lambda: application("ResNet101V2"),
    "VGG16": lambda: application("VGG16"),
    "DenseNet121": lambda: application("DenseNet121"),
    "InceptionV3": lambda: application("InceptionV3", 299),
    "Xception": lambda: application("Xception", 299),
}


def flops(model, shape):
    """FLOPs of a forward pass, by XLA."""
    import jax

    weights = [variable.value for variable in model.trainable_variables]
    others = [variable.value for variable in model.non_trainable_variables]

    def forward(weights, others, inputs):
        return model.stateless_call(weights, others, inputs, training=False)[0]

    compiled = jax.jit(forward).lower(weights, others, jax.ShapeDtypeStruct(shape, "float32")).compile()
    return compiled.cost_analysis()["flops"]


def main():
    """Counts, prints and writes."""
    results = harness.parser(__doc__).parse_args().results
    os.environ["KERAS_BACKEND"] = "jax"
    found = {}
    for name, make in MODELS.items():
        found[name] = flops(*make())
        print(f"{name}: {found[name]:,.0f} FLOPs for {BATCH} examples", flush=True)
    versions = {name: metadata.version(name) for name in ("jax", "keras")} | {"python": platform.python_version()}
    harness.write(results, {"versions": versions, "batch_size": BATCH, "flops": found})


if __name__ == "__main__":
    main()
