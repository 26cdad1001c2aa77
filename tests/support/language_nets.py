"""Small language models, and batches of tokens for them."""

import keras
import numpy as np
import tensorflow as tf

from tfopt import precision

VOCABULARY, LENGTH, WIDTH, EXAMPLES = 50, 7, 16, 8


def tokens(batches=3, length=LENGTH, seed=0):
    """Inputs and labels, (examples, length) each."""
    return np.random.default_rng(seed).integers(VOCABULARY, size=(2, batches * EXAMPLES, length)).astype("int32")


def batched(*arrays):
    return tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(EXAMPLES)


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def hidden_states(embedded):
    """What stands between an embedding and the last product."""
    layers = keras.layers
    inner = layers.Dense(WIDTH, activation="gelu")(layers.LayerNormalization()(embedded))
    return layers.LayerNormalization()(layers.Add()([embedded, inner]))  # unlike +, Add passes the mask on


def dense_net(policy="float32", *, head=None, mask_zero=False, **compile_options):
    """Ends in a Dense layer with a bias, or in `head`, which makes another layer."""
    with precision.policy(policy):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((None,), dtype="int32")
        hidden = hidden_states(keras.layers.Embedding(VOCABULARY, WIDTH, mask_zero=mask_zero)(inputs))
        head = head() if head else keras.layers.Dense(VOCABULARY, bias_initializer="random_normal")
        return compiled(keras.Model(inputs, head(hidden)), **compile_options)


def tied_net(policy="float32", *, soft_cap=None, tied=True, **compile_options):
    """Ends in its embedding in reverse, cast to float32."""
    with precision.policy(policy):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((None,), dtype="int32")
        embedding = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=tied, logit_soft_cap=soft_cap)
        logits = embedding(hidden_states(embedding(inputs)), reverse=True)
        outputs = keras.layers.Activation("linear", dtype="float32")(logits)
        return compiled(keras.Model(inputs, outputs), **compile_options)


def compiled(model, **options):
    """Compiles for gradients large enough to show what is wrong with them."""
    model.compile(
        **{"optimizer": keras.optimizers.SGD(0.5, momentum=0.9), "loss": cross_entropy(), "jit_compile": False}
        | options
    )
    return model


class Subclassed(keras.Model):
    """A language model without a graph of layers."""

    def __init__(self, *, tied):
        super().__init__()
        self.embedding = keras.layers.ReversibleEmbedding(VOCABULARY, WIDTH)
        self.inner = keras.layers.Dense(WIDTH, activation="gelu")
        self.head = None if tied else keras.layers.Dense(VOCABULARY)

    def call(self, inputs):
        hidden = self.inner(self.embedding(inputs))
        logits = self.head(hidden) if self.head else self.embedding(hidden, reverse=True)
        return keras.ops.cast(logits, "float32")
