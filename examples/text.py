"""Trains a small decoder on text, byte by byte: documents of any length, packed into rows of one length.

Run it as it is: `python examples/text.py [FILE ...]`. Each line of the files is a document; without files, the
documents are the help texts that come with Python.
"""

import pydoc_data.topics
import sys

import keras

import tfopt
from tfopt.pipelines import lines, plan_pipeline, tokens

LENGTH, VOCABULARY, WIDTH = 256, 258, 64
END = 257  # the token after each document; a byte's is its value plus 1, and 0 is padding


def encode(texts):
    return [[byte + 1 for byte in text.encode()] + [END] for text in texts]


if len(sys.argv) > 1:
    texts = lines(sys.argv[1:])
else:
    paragraphs = (text.split("\n\n") for text in pydoc_data.topics.topics.values())
    texts = [paragraph for some in paragraphs for paragraph in some][:3000]
documents = tokens(texts, tokenize=encode)
train = plan_pipeline(documents, pack=LENGTH, batch_size=16, split=0.1, seed=0)
print(train)
evaluation = plan_pipeline(documents, pack=LENGTH, batch_size=16, split=0.1, training=False)

keras.utils.set_random_seed(0)
inputs = {name: keras.Input((LENGTH,), dtype="int32", name=name) for name in ("tokens", "segments", "positions")}
embed = keras.layers.Embedding
hidden = embed(VOCABULARY, WIDTH)(inputs["tokens"]) + embed(LENGTH, WIDTH)(inputs["positions"])
mask = tfopt.kernels.segment_mask(inputs["segments"])  # a token sees the earlier ones of its own document
for _ in range(2):
    normed = keras.layers.LayerNormalization()(hidden)
    hidden += keras.layers.MultiHeadAttention(4, WIDTH // 4)(normed, normed, attention_mask=mask)
    normed = keras.layers.LayerNormalization()(hidden)
    hidden += keras.layers.Dense(WIDTH)(keras.layers.Dense(4 * WIDTH, activation="gelu")(normed))
model = keras.Model(inputs, keras.layers.Dense(VOCABULARY)(keras.layers.LayerNormalization()(hidden)))
model.compile(
    keras.optimizers.Adam(3e-3),
    # The mean over the tokens that have a next one: Keras' default would divide by padding, too.
    keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="mean_with_sample_weight"),
    weighted_metrics=["accuracy"],
)
if tfopt.kernels.use_flash_attention(model):
    print(tfopt.kernels.explain(model))
model.fit(train.build(), epochs=2, validation_data=evaluation.build(), verbose=2)
found = model.evaluate(evaluation.build(), verbose=0, return_dict=True)
accuracy = found["weighted_accuracy" if "weighted_accuracy" in found else "accuracy"]
print(f"{accuracy:.1%} of the next bytes are predicted correctly")
