"""A transformer block that classifies reviews, given as padded token ids in arrays."""

import keras
import numpy as np

LENGTH, WORDS, WIDTH = 120, 20_000, 32


class TransformerBlock(keras.layers.Layer):
    def __init__(self, width, heads, inner, rate=0.1):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, width)
        self.inner = keras.Sequential([keras.layers.Dense(inner, activation="relu"), keras.layers.Dense(width)])
        self.norm_1, self.norm_2 = keras.layers.LayerNormalization(), keras.layers.LayerNormalization()
        self.drop_1, self.drop_2 = keras.layers.Dropout(rate), keras.layers.Dropout(rate)

    def call(self, x, training=None):
        x = self.norm_1(x + self.drop_1(self.attention(x, x), training=training))
        return self.norm_2(x + self.drop_2(self.inner(x), training=training))


class TokensAndPositions(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = keras.layers.Embedding(WORDS, WIDTH), keras.layers.Embedding(LENGTH, WIDTH)

    def call(self, x):
        return self.tokens(x) + self.positions(keras.ops.arange(LENGTH))


keras.utils.set_random_seed(0)
x, y = np.random.randint(1, WORDS, size=(4_000, LENGTH)), np.random.randint(0, 2, size=4_000)

inputs = keras.Input((LENGTH,))
hidden = TransformerBlock(WIDTH, heads=2, inner=32)(TokensAndPositions()(inputs))
hidden = keras.layers.Dropout(0.1)(keras.layers.GlobalAveragePooling1D()(hidden))
outputs = keras.layers.Dense(2, activation="softmax")(keras.layers.Dense(20, activation="relu")(hidden))
model = keras.Model(inputs, outputs)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x[:3_600], y[:3_600], batch_size=32, epochs=2, validation_data=(x[3_600:], y[3_600:]))
