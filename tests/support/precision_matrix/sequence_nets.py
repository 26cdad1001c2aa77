"""Healthy nets of sequences: recurrent, convolutional and transformers, with data that they can learn."""

import keras
import numpy as np

from precision_matrix.nets import ROWS, compiled, cross_entropy, of_rows, random

layers, ops = keras.layers, keras.ops
LENGTH, VOCABULARY = 12, 30


def series(length=16):
    """Noise; the class is the sign of the sum of its second feature."""
    x = random().normal(size=(ROWS, length, 2)).astype("float32")
    return x, (x[..., 1].sum(-1) > 0).astype("int32")


def sentences(length=LENGTH):
    """Token ids, 0 is padding; the class is which of two tokens occurs more often."""
    x = random().integers(1, VOCABULARY, size=(ROWS, length))
    x[np.arange(length)[None] >= random(1).integers(length // 2, length + 1, size=(ROWS, 1))] = 0
    return x.astype("int32"), ((x < 15) & (x > 0)).sum(-1).__gt__((x >= 15).sum(-1)).astype("int32")


def of_series(body, data=None, **options):
    return of_rows(body, data or series(), classes=2, **options)


def lstm():
    return of_series(layers.LSTM(16, dropout=0.1))


def gru():
    return of_series(lambda x: layers.GRU(16)(layers.GRU(16, return_sequences=True, recurrent_dropout=0.1)(x)))


def bidirectional():
    return of_series(lambda x: layers.Bidirectional(layers.LSTM(8))(layers.Masking(0.0)(x)))


def cells():
    def body(x):
        x = layers.RNN([layers.GRUCell(8), layers.LSTMCell(8)], return_sequences=True)(x)
        return layers.SimpleRNN(8)(layers.TimeDistributed(layers.Dense(8))(x))

    return of_series(body)


def wavenet():
    def body(x):
        x = layers.Conv1D(16, 1)(x)
        for rate in (1, 2, 4):
            y = layers.Conv1D(32, 2, padding="causal", dilation_rate=rate)(x)
            x = x + layers.Conv1D(16, 1)(ops.tanh(y[..., :16]) * ops.sigmoid(y[..., 16:]))
        return layers.GlobalAveragePooling1D()(x)

    return of_series(body)


def video():
    x = random().normal(size=(ROWS, 4, 8, 8, 1)).astype("float32")

    def body(x):
        return layers.GlobalAveragePooling2D()(layers.ConvLSTM2D(4, 3, padding="same")(x))

    return of_rows(body, (x, (x.mean((1, 2, 3, 4)) > 0).astype("int32")), classes=2)


def bag_of_words():
    def body(x):
        return layers.Dense(16, "relu")(layers.GlobalAveragePooling1D()(layers.Embedding(30, 16, mask_zero=True)(x)))

    return of_rows(body, sentences(), classes=2)


class Positions(layers.Layer):
    """Sinusoids, in float32 whatever the dtype."""

    supports_masking = True

    def call(self, x):
        place = ops.arange(x.shape[1], dtype="float32")[:, None] * ops.exp(-ops.arange(8, dtype="float32"))
        return x + ops.cast(ops.concatenate([ops.sin(place), ops.cos(place)], -1), x.dtype)


def block(x, *, causal=False, other=None):
    normed = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 8, dropout=0.1)(normed, normed, use_causal_mask=causal)
    if other is not None:
        x = x + layers.MultiHeadAttention(2, 8)(layers.LayerNormalization()(x), other)
    return x + layers.Dense(16)(layers.Dense(32, activation="gelu")(layers.LayerNormalization()(x)))


def encoder():
    def body(x):
        return layers.GlobalAveragePooling1D()(block(Positions()(layers.Embedding(30, 16, mask_zero=True)(x))))

    return of_rows(body, sentences(), classes=2)


def decoder(data=None):
    """The next token, where padding counts for nothing."""
    x, _ = data or sentences()
    y = np.roll((x + 1) % VOCABULARY, -1, -1).astype("int32")
    inputs = keras.Input((x.shape[1],), dtype="int32")
    found = block(Positions()(layers.Embedding(30, 16, mask_zero=True)(inputs)), causal=True)
    outputs = layers.Dense(VOCABULARY, name="head")(layers.LayerNormalization()(found))
    return compiled(inputs, outputs), (x, y, (x > 0).astype("float32"))


def long_decoder():
    """At 1,024 positions, counted in float32."""
    model, data = decoder(sentences(1024))
    return model, tuple(part[:4] for part in data)


def encoder_decoder():
    x, _ = sentences()
    source, target = (
        keras.Input((LENGTH,), dtype="int32", name="source"),
        keras.Input((LENGTH,), dtype="int32", name="t"),
    )
    memory = block(Positions()(layers.Embedding(30, 16, mask_zero=True)(source)))
    found = block(Positions()(layers.Embedding(30, 16, mask_zero=True)(target)), causal=True, other=memory)
    model = compiled({"source": source, "t": target}, layers.Dense(VOCABULARY, name="head")(found))
    return model, ({"source": x, "t": np.roll(x, 1, -1)}, x)


class Tied(keras.Model):
    """The embedding's matrix also makes the logits, in float32."""

    def __init__(self):
        super().__init__(name="net")
        self.tokens = layers.Embedding(VOCABULARY, 16, name="tokens")
        self.body = layers.GRU(16, return_sequences=True, name="body")

    def call(self, x):
        return ops.matmul(ops.cast(self.body(self.tokens(x)), "float32"), ops.transpose(self.tokens.embeddings.value))


def tied():
    x, _ = sentences()
    model = Tied()
    model.compile(keras.optimizers.Adam(3e-3), cross_entropy())
    return model, (x, ((x + 1) % VOCABULARY).astype("int32"))


def reversible():
    x, _ = sentences()
    inputs = keras.Input((LENGTH,), dtype="int32")
    tokens = layers.ReversibleEmbedding(VOCABULARY, 16, name="tokens")
    found = layers.GRU(16, return_sequences=True)(tokens(inputs))
    return compiled(inputs, tokens(found, reverse=True)), (x, ((x + 1) % VOCABULARY).astype("int32"))


def grouped_attention():
    def body(x):
        x = layers.GroupQueryAttention(8, 4, 2)(layers.Dense(16)(x), layers.Dense(16)(x))
        return layers.GlobalMaxPooling1D()(layers.Attention(use_scale=True)([x, x]))

    return of_series(body)


class Translated(keras.losses.Loss):
    """Connectionist temporal classification, in float32."""

    def call(self, y, logits):
        lengths = (ops.full((ops.shape(y)[0],), part.shape[1], dtype="int32") for part in (y, logits))
        return ops.ctc_loss(ops.cast(y, "int32"), ops.cast(logits, "float32"), *lengths)


def transcribing():
    x, _ = series(16)
    y = (1 + (x[:, 2:14:4, 0] > 0) + 2 * (x[:, 2:14:4, 1] > 0)).astype("int32")
    inputs = keras.Input((16, 2))
    found = layers.Bidirectional(layers.GRU(16, return_sequences=True))(inputs)
    return compiled(inputs, layers.Dense(5, name="head")(found), Translated()), (x, y)


def hard_masks():
    """Masks with the largest number that each dtype holds, as Keras makes them; whole rows are padding."""

    class Attend(layers.Layer):
        def call(self, x):
            hidden = ops.all(ops.equal(x, 0), -1)[:, None]
            scores = ops.matmul(x, ops.swapaxes(x, 1, 2))
            if scores.dtype == "float16":
                scores = ops.where(hidden, ops.full_like(scores, -65504.0), scores)
            else:
                scores = ops.where(hidden, ops.full_like(scores, -3e38), scores)
            return ops.matmul(ops.softmax(scores), x)

    x, y = series()
    x[:, 10:] = 0
    x[:3] = 0
    return of_series(lambda x: layers.GlobalAveragePooling1D()(Attend()(x)), (x, y))


HEALTHY = (
    lstm, gru, bidirectional, cells, wavenet, video, bag_of_words, encoder, decoder, long_decoder,
    encoder_decoder, tied, reversible, grouped_attention, transcribing, hard_masks,
)  # fmt: skip
