"""GPT-2 with 124 million parameters, on the source text of Python's own library."""

import re
import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tfopt.errors import UnsupportedError

LENGTH = 1024
# GPT-2's 50,257 tokens, rounded up to a multiple of 128 for the Tensor Cores.
VOCABULARY = 50304


class Positions(keras.layers.Layer):
    """Adds a learned vector to each position of a sequence."""

    def build(self, shape: tuple[int, ...]) -> None:
        """Makes the table: (length, width)."""
        self.table = self.add_weight(shape=shape[1:], initializer=_initial(), name="table")

    def call(self, inputs: Any) -> Any:
        """Inputs and outputs: (batch, length, width)."""
        return inputs + self.table


def model(
    *,
    blocks: int = 12,
    width: int = 768,
    heads: int = 12,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    jit_compile: bool | str = "auto",
) -> keras.Model:
    """GPT-2 from random weights, compiled with AdamW, under the global dtype policy.

    Blocks normalize first, the embedding is the last layer's matrix as well, and there is no dropout. As published, but
    for the size of the vocabulary. The perceptrons are four times as wide as a token's vector, `width`.
    """
    layers = keras.layers
    # Without its own dtype the last product, by far the largest, would be in float32 under any policy.
    reverse_dtype = keras.config.dtype_policy().compute_dtype
    embedding = layers.ReversibleEmbedding(
        vocabulary, width, embeddings_initializer=_initial(), reverse_dtype=reverse_dtype
    )
    tokens = keras.Input((length,), dtype="int32")
    hidden = Positions()(embedding(tokens))
    for _ in range(blocks):
        normal = layers.LayerNormalization(epsilon=1e-5)(hidden)
        attention = layers.MultiHeadAttention(heads, width // heads, kernel_initializer=_initial())
        hidden = hidden + attention(normal, normal, use_causal_mask=True)
        inner = layers.Dense(4 * width, kernel_initializer=_initial())(layers.LayerNormalization(epsilon=1e-5)(hidden))
        inner = keras.ops.gelu(inner, approximate=True)
        hidden = hidden + layers.Dense(width, kernel_initializer=_initial())(inner)
    logits = embedding(layers.LayerNormalization(epsilon=1e-5)(hidden), reverse=True)
    net = keras.Model(tokens, layers.Activation("linear", dtype="float32")(logits))
    net.compile(
        keras.optimizers.AdamW(3e-4, weight_decay=0.1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return net


def batch(size: int, *, length: int = LENGTH, vocabulary: int = VOCABULARY, seed: int = 0) -> tuple[Any, Any]:
    """One batch of text, cut at random; the targets are the next tokens.

    Returns:
        Tokens and targets, each of shape (size, length), int32 from 0 to `vocabulary` - 1.
    """
    tokens = text(vocabulary)
    starts = np.random.default_rng(seed).integers(len(tokens) - length, size=size)
    cut = tokens[starts[:, None] + np.arange(length + 1)]
    return cut[:, :-1], cut[:, 1:]


@cache
def text(vocabulary: int = VOCABULARY) -> Any:
    """The source files of Python's standard library as int32 tokens.

    A token is a word or a sign with the space before it, numbered by first appearance. There are about 54,000, so that
    the whole vocabulary is used, with the frequencies of text: repeated tokens cost the embedding's gradient time.

    Raises:
        tfopt.errors.UnsupportedError: If this Python came without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    sources = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(sources) < 1_000_000:
        raise UnsupportedError(
            f"Expected the source files of Python's standard library in {folder}. Found {len(sources)} bytes. Use a "
            "Python that has them: GPT-2 is trained on their text."
        )
    numbers: dict[bytes, int] = {}
    words = re.findall(rb"\s*\w+|\s*[^\w\s]", sources)
    return np.array([numbers.setdefault(word, len(numbers)) for word in words], "int32") % vocabulary


def _initial() -> keras.initializers.Initializer:
    """GPT-2's own: with larger vectors the first logits, and the first loss, would be far too large."""
    return keras.initializers.RandomNormal(stddev=0.02)
