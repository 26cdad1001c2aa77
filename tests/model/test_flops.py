import inspect

import keras
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.kernels.cudnn.calls import flash_attention
from tfopt.memory import recompute
from tfopt.model.flops import fit_flops
from tfopt.model.graph_flops import FlopsCounter
from tfopt.model.graph_shapes import known_of

layers, ops = keras.layers, keras.ops
BATCH = 3


def traced(model, *inputs, optimizer="sgd", examples=BATCH, **options):
    """Traces the training step for inputs without a fixed batch size, as `fit` does, and counts its FLOPs."""
    specs = [one if isinstance(one, tf.TypeSpec) else tf.TensorSpec((None, *one)) for one in inputs]
    spec = (specs[0] if len(specs) == 1 else tuple(specs), tf.TensorSpec((None,)))
    if not model.compiled:
        model.compile(optimizer, lambda _, output: ops.mean(output), **options)
    model.make_train_function()
    inspect.getclosurevars(model.train_function).nonlocals["one_step_on_data"].__wrapped__.get_concrete_function(spec)
    return fit_flops(model, spec, examples)


def counted(*stack, shape=(4,), **options):
    return traced(keras.Sequential(stack), shape, **options)


def resnet50_multiply_adds():
    """ResNet-50 forward at 224×224: He et al., 2015, table 1, with the stride in a stage's first 1×1 convolution."""
    total = 112**2 * 7 * 7 * 3 * 64
    channels, inputs, size = 64, 64, 56
    for blocks in (3, 4, 6, 3):
        for block in range(blocks):
            total += size**2 * (inputs * channels + 9 * channels**2 + channels * 4 * channels)
            if block == 0:
                total += size**2 * inputs * 4 * channels  # the shortcut's
            inputs = 4 * channels
        channels, size = 2 * channels, size // 2
    return total + 2048 * 1000


@pytest.mark.slow
def test_resnet50():
    found = traced(keras.applications.ResNet50(weights=None), (224, 224, 3))
    assert resnet50_multiply_adds() == 3_857_973_248
    # The first convolution has no gradient of its inputs.
    assert found.per_example == 2 * (3 * 3_857_973_248 - 112**2 * 7 * 7 * 3 * 64)
    assert found.unknown == ()


# What the layer computes forward, in multiply-adds: of the images or sequences themselves, and of what it made of them.
@pytest.mark.parametrize(
    ("stack", "shape", "first", "rest"),
    first_quick(
        [
            ([layers.Dense(5)], (4,), 4 * 5, 0),
            ([layers.LSTM(5)], (7, 4), 7 * 4 * 4 * 5, 7 * 4 * 5 * 5),
            (
                [layers.Conv2D(6, 3, padding="same", strides=2), layers.BatchNormalization()],
                (8, 8, 3),
                16 * 9 * 3 * 6,
                0,
            ),
            ([layers.Dense(5), layers.Conv1DTranspose(6, 3, strides=2)], (8, 3), 8 * 3 * 5, 8 * 3 * 5 * 6),
            ([layers.Dense(5, activation="relu"), layers.Dropout(0.5), layers.Dense(2)], (4,), 4 * 5, 5 * 2),
            ([layers.Dense(5)], (7, 4), 7 * 4 * 5, 0),
            ([layers.EinsumDense("abc,cd->abd", (None, 5))], (7, 4), 7 * 4 * 5, 0),
            ([layers.Dense(3), layers.Conv2D(6, 3, groups=3)], (8, 8, 3), 64 * 3 * 3, 36 * 9 * 6),
            ([layers.DepthwiseConv2D(3)], (8, 8, 3), 36 * 9 * 3, 0),
            ([layers.Dense(3), layers.DepthwiseConv2D(3, 2, depth_multiplier=2)], (8, 8, 3), 64 * 9, 9 * 9 * 6),
            ([layers.SeparableConv2D(5, 3)], (8, 8, 3), 36 * 9 * 3, 36 * 3 * 5),
            ([layers.Conv1D(6, 2)], (8, 3), 7 * 2 * 3 * 6, 0),
            ([layers.Conv1D(6, 3, dilation_rate=2, padding="causal")], (8, 3), 8 * 3 * 3 * 6, 0),
            ([layers.Dense(2), layers.Conv2D(6, 3, dilation_rate=2)], (8, 8, 3), 64 * 6, 16 * 9 * 2 * 6),
            # TensorFlow splits these into parts, and pads the parts to one size.
            ([layers.Conv1D(6, 3, dilation_rate=4, padding="causal")], (9, 3), 9 * 3 * 3 * 6, 0),
            (
                [layers.Dense(2), layers.Conv2D(6, 3, dilation_rate=4, padding="same")],
                (9, 9, 3),
                81 * 6,
                81 * 9 * 2 * 6,
            ),
            ([layers.Dense(2), layers.Conv2D(6, 3, dilation_rate=4, groups=2)], (9, 9, 3), 81 * 6, 9 * 6),
            ([layers.Dense(2), layers.Conv3D(6, 3, dilation_rate=2)], (6, 5, 5, 3), 150 * 6, 2 * 27 * 2 * 6),
            ([layers.Dense(2), layers.DepthwiseConv2D(3, dilation_rate=3)], (8, 8, 3), 64 * 6, 4 * 9 * 2),
            ([layers.Conv3D(2, 3)], (4, 5, 6, 3), 2 * 3 * 4 * 27 * 3 * 2, 0),
            ([layers.Conv2DTranspose(6, 3, strides=2, padding="same")], (8, 8, 3), 64 * 9 * 3 * 6, 0),
            ([layers.Embedding(100, 8), layers.Flatten(), layers.Dense(2)], (6,), 0, 6 * 8 * 2),
            ([layers.GRU(5)], (7, 4), 7 * 3 * 4 * 5, 7 * 3 * 5 * 5),
            ([layers.Bidirectional(layers.SimpleRNN(5))], (7, 4), 2 * 7 * 4 * 5, 2 * 7 * 5 * 5),
            ([layers.LSTM(5, return_sequences=True), layers.Dense(2)], (7, 4), 7 * 4 * 4 * 5, 7 * (4 * 5 * 5 + 5 * 2)),
            ([layers.ConvLSTM1D(2, 3)], (4, 8, 3), 4 * 4 * 6 * 3 * 3 * 2, 4 * 4 * 6 * 3 * 2 * 2),
            ([layers.TimeDistributed(layers.Dense(5))], (7, 4), 7 * 4 * 5, 0),
            ([keras.Sequential([layers.Dense(5)]), layers.LayerNormalization()], (4,), 4 * 5, 0),
        ],
        count=4,
    ),
)
def test_layers_by_hand(stack, shape, first, rest):
    # Backward, each product takes two more; the gradient of the model's own input is not needed.
    found = counted(*stack, shape=shape)
    assert (found.per_example, found.unknown) == (2 * (2 * first + 3 * rest), ())


def test_frozen_layers_have_less_of_a_backward_pass_or_none():
    def passes(*trainable):
        return counted(*(layers.Dense(4, trainable=each) for each in trainable)).per_example / (2 * 16)

    assert passes(True, False, True) == 2 + 2 + 3
    assert passes(False, False, True) == 1 + 1 + 2
    convolutions = [layers.Conv2D(3, 1, trainable=each) for each in (False, True)]
    assert counted(*convolutions, shape=(2, 2, 3)).per_example == 2 * 4 * 9 * (1 + 2)


def test_attention_between_sequences():
    queries, values = keras.Input((6, 8)), keras.Input((10, 8))
    output = layers.MultiHeadAttention(2, 3, value_dim=5)(queries, values)
    inputs = 6 * 8 * 2 * 3 + 10 * 8 * 2 * 3 + 10 * 8 * 2 * 5
    rest = 2 * 6 * 10 * (3 + 5) + 6 * 2 * 5 * 8
    assert traced(keras.Model([queries, values], output), (6, 8), (10, 8)).per_example == 2 * (2 * inputs + 3 * rest)


class Own(keras.Model):
    """A model with a call of its own around one layer of 4 × 4 weights, not built before it trains."""

    def __init__(self, call, **options):
        super().__init__(**options)
        self.dense, self._call = layers.Dense(4, use_bias=False), call

    def call(self, inputs):
        return self._call(inputs, self.dense)


LENGTH = 7


def while_loop(inputs, dense):
    return ops.while_loop(lambda i, _: i < 12, lambda i, x: (i + 5, dense(x)), (2, dense(inputs)))[1]


def graph_loop(inputs, dense):
    return tf.while_loop(lambda i, _: i < tf.shape(inputs)[1], lambda i, x: (i + 1, dense(x)), (0, dense(inputs)))[1]


def downward(inputs, dense):
    return tf.while_loop(lambda i, _: i >= 1, lambda i, x: (i - 2, dense(x)), (6, dense(inputs)))[1]


def scanned(inputs, dense):
    return ops.scan(lambda carry, x: (dense(carry) + x, x), dense(inputs)[:, 0], ops.moveaxis(inputs, 1, 0))[0]


def nested(inputs, dense):
    inner = lambda _, x: ops.fori_loop(0, 2, lambda _, y: dense(y), x)  # noqa: E731
    return ops.fori_loop(0, 3, inner, dense(inputs))


def with_a_mask(inputs, dense):
    return dense(inputs + ops.slice_update(ops.zeros((LENGTH, 4)), (1, 0), ops.ones((2, 4))))


# The multiply-adds of the first product, and those of products whose input has a gradient too.
@pytest.mark.parametrize(
    ("call", "first", "rest"),
    first_quick(
        [
            (
                lambda inputs, dense: ops.fori_loop(0, 5, lambda _, x: dense(x), dense(inputs)),
                LENGTH * 16,
                5 * LENGTH * 16,
            ),
            (scanned, LENGTH * 16, LENGTH * 16),
            (while_loop, LENGTH * 16, 2 * LENGTH * 16),
            (graph_loop, LENGTH * 16, LENGTH * LENGTH * 16),
            (downward, LENGTH * 16, 3 * LENGTH * 16),
            (nested, LENGTH * 16, 6 * LENGTH * 16),
            (lambda inputs, dense: ops.map(dense, inputs), LENGTH * 16, 0),
            (lambda inputs, dense: ops.vectorized_map(dense, inputs), LENGTH * 16, 0),
            (lambda inputs, dense: tf.function(dense, jit_compile=True)(inputs), LENGTH * 16, 0),
            (lambda inputs, dense: tf.function(lambda x: dense(dense(x)))(inputs), LENGTH * 16, LENGTH * 16),
            (lambda inputs, dense: ops.cond(True, lambda: dense(inputs), lambda: inputs), LENGTH * 16, 0),
            (lambda inputs, dense: keras.remat(lambda x: ops.tanh(dense(x)))(dense(inputs)), LENGTH * 16, LENGTH * 16),
            (lambda inputs, dense: dense(dense(inputs)), LENGTH * 16, LENGTH * 16),
            (with_a_mask, LENGTH * 16, 0),
        ],
        count=2,
    ),
)
def test_what_a_call_of_its_own_computes(call, first, rest):
    found = traced(Own(call), (LENGTH, 4))
    assert (found.unknown, found.per_example) == ((), 2 * (2 * first + 3 * rest))


def test_products_of_the_call_itself():
    def attention(inputs, dense):
        made = dense(inputs)
        return ops.einsum("bij,bjk->bik", ops.matmul(made, ops.transpose(made, (0, 2, 1))), made)

    squares = 2 * LENGTH * LENGTH * 4
    assert traced(Own(attention), (LENGTH, 4)).per_example == 2 * (2 * LENGTH * 16 + 3 * squares)


def test_products_of_the_batch_with_itself():
    def contrasted(inputs, dense):
        made = dense(inputs)
        return ops.matmul(made, ops.transpose(made))

    assert traced(Own(contrasted), (4,)).per_example == 2 * (2 * 16 + 3 * BATCH * 4)


def data_loop(inputs, dense):
    return tf.while_loop(lambda x: ops.sum(x) < 1, lambda x: [dense(x)], [dense(inputs)])[0]


def branch(inputs, dense):
    return tf.cond(ops.sum(inputs) > 0, lambda: dense(inputs), lambda: inputs)


def python(inputs, dense):
    return dense(tf.ensure_shape(tf.py_function(lambda x: x @ x, [inputs], tf.float32), inputs.shape))


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (data_loop, "how often the loop runs follows from its data"),
        (branch, "which branch runs follows from its data"),
        (python, "what EagerPyFunc computes is not known"),
        (lambda inputs, dense: ops.cholesky(dense(inputs)), "what Cholesky computes is not known"),
    ],
)
def test_what_is_not_known_is_named(call, reason):
    found = traced(Own(call), (4, 4))
    assert found.per_example is None
    assert reason in " ".join(found.unknown)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_branches_that_compute_as_much(jit_compile):
    def call(inputs, dense):
        return tf.cond(ops.sum(inputs) > 0, lambda: dense(inputs), lambda: dense(-inputs))

    assert traced(Own(call), (4,), jit_compile=jit_compile).per_example == 2 * 2 * 16


def test_sparse_products():
    graph = tf.sparse.from_dense([[1.0, 0, 0], [0, 2, 3], [0, 0, 4]])

    def propagated(inputs, dense):
        made = ops.transpose(dense(inputs), (1, 0, 2))
        return tf.sparse.sparse_dense_matmul(graph, ops.reshape(made, (3, -1)))

    found = traced(Own(propagated), (3, 4))
    assert found.per_example == 2 * (2 * 3 * 16 + 2 * 4 * 4)  # the graph itself has no gradient
    spec = tf.SparseTensorSpec((None, 4))
    found = traced(Own(lambda inputs, dense: tf.sparse.sparse_dense_matmul(inputs, tf.eye(4) + dense(tf.eye(4)))), spec)
    assert found.per_example is None
    assert "a size is open" in found.unknown[0]


def test_a_dense_layer_on_sparse_inputs_is_unknown():
    stack = [keras.Input((4,), sparse=True), layers.Dense(3, use_bias=False), layers.Dense(2)]
    found = traced(keras.Sequential(stack), tf.SparseTensorSpec((8, 4)))
    assert found.per_example is None
    assert "SegmentSum" in found.unknown[0]


def test_lengths_that_only_the_data_fixes():
    stack = [keras.Input((None, 4)), layers.Dense(4), layers.LSTM(3)]
    found = traced(keras.Sequential(stack), (LENGTH, 4))
    assert found.per_example == 2 * (2 * LENGTH * 16 + 3 * LENGTH * 4 * (4 * 3 + 3 * 3))
    found = traced(keras.Sequential([keras.Input((None, 4)), layers.Dense(4)]), (None, 4))
    assert found.per_example is None
    assert "a size is open" in found.unknown[0]


def test_lora():
    dense = layers.Dense(5)
    dense.build((None, 4))
    dense.enable_lora(2)
    found = traced(keras.Sequential([keras.Input((4,)), dense]), (4,))
    # The kernel's gradient leads on to those of the two small matrices, whose product is taken once per batch.
    assert sum(found.by_dtype.values()) == 2 * (BATCH * 2 * 4 * 5 + 3 * 4 * 2 * 5)


def test_the_optimizers_own_products_are_not_the_models():
    muon = keras.optimizers.LossScaleOptimizer(keras.optimizers.Muon(0.1, exclude_layers=[]))
    assert counted(layers.Dense(4), layers.Dense(4), optimizer=muon).per_example == 2 * (2 + 3) * 16


class Distilled(keras.Model):
    """Trains a student against a teacher, in a step of its own."""

    def __init__(self):
        super().__init__()
        self.teacher, self.student = layers.Dense(4), layers.Dense(4)

    def call(self, inputs):
        return self.student(inputs)

    def train_step(self, data):
        inputs, _ = data
        with tf.GradientTape() as tape:
            loss = ops.mean((self.teacher(inputs) - self.student(inputs)) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.student.trainable_weights), self.student.trainable_weights)
        return {"loss": loss}


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers.Conv1D(4, 3, activation="relu"),
        lambda: layers.LSTM(3, use_cudnn=False),
        lambda: layers.MultiHeadAttention(2, 3),
    ],
)
@pytest.mark.parametrize("jit_compile", [False, True])
def test_what_is_computed_again_to_save_memory_is_left_out(make, jit_compile):
    def found(recomputing):
        inputs = keras.Input((LENGTH, 4))
        hidden, layer = layers.Dense(4)(inputs), make()
        hidden = layer(hidden, hidden) if isinstance(layer, layers.MultiHeadAttention) else layer(hidden)
        model = keras.Model(inputs, layers.Dense(2)(hidden))
        if recomputing:
            recompute(model, layers=[layer])
        return traced(model, (LENGTH, 4), jit_compile=jit_compile)

    assert found(True) == found(False)


def test_a_train_step_of_ones_own():
    model = Distilled()
    model.teacher.build((None, 4))
    model(ops.zeros((1, 4)))
    assert traced(model, (4,)).per_example == 2 * (1 + 2) * 16


def test_the_dtype_that_most_run_in():
    found = counted(layers.Dense(50, dtype="mixed_bfloat16"), layers.Dense(2, dtype="float32"))
    assert found.by_dtype == {"bfloat16": BATCH * 4 * 4 * 50, "float32": BATCH * 6 * 50 * 2}
    assert found.dtype == "bfloat16"
    transposed = counted(layers.Conv2DTranspose(2, 1), shape=(3, 3, 1))
    assert transposed.by_dtype == {"float32": BATCH * 4 * 9 * 2}


def test_a_model_without_products_has_no_flops():
    assert counted(layers.LayerNormalization()).per_example is None


def test_float8():
    model = keras.Sequential([keras.Input((7, 16)), layers.Dense(16), layers.EinsumDense("abc,cd->abd", (None, 16))])
    for layer in model.layers:
        layer.quantize("float8")
    assert traced(model, (7, 16)).by_dtype == {"float8": BATCH * 2 * (2 + 3) * 7 * 256}


def count(function, *specs):
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return FlopsCounter().count(graph, [known_of(tensor) for tensor in graph.inputs])


@pytest.mark.parametrize("biased", [False, True])
def test_cudnn_attention(biased):
    """Traced, not run: four of the backward pass's products count, and not the one that it computes again."""

    def step(query, key):
        bias = tf.zeros((1, 4, 64, 128), tf.bfloat16) if biased else None
        with tf.GradientTape() as tape:
            tape.watch([query, key])
            output = flash_attention(query, key, 2 * key, causal=False, scale=1.0, bias=bias)
        return tape.gradient(output, [query, key])

    specs = [tf.TensorSpec((2, length, 4, 8), tf.bfloat16) for length in (64, 128)]
    assert count(step, *specs).by_dtype == {"bfloat16": 2 * (2 + 4) * 2 * 4 * 64 * 128 * 8}


@pytest.mark.parametrize(
    ("directions", "layers_deep", "forward"),
    [(1, 1, 5 * (3 + 5)), (2, 1, 2 * 5 * (3 + 5)), (2, 2, 2 * 5 * (3 + 5) + 2 * 5 * (2 * 5 + 5))],
)
@pytest.mark.parametrize("batch_first", [False, True])  # True as Keras' own layers ask for it
def test_cudnn_recurrent_layers(directions, layers_deep, forward, batch_first):
    """Traced, not run."""

    def step(inputs):
        stacked = directions * layers_deep
        state = tf.zeros([2, stacked, 5] if batch_first else [stacked, 2, 5])
        weights = tf.zeros([4 * (forward + 2 * 5 * directions * layers_deep)])
        with tf.GradientTape() as tape:
            tape.watch([inputs, weights])
            output = tf.raw_ops.CudnnRNNV3(
                input=inputs,
                input_h=state,
                input_c=state,
                params=weights,
                sequence_lengths=tf.fill([2], 7),
                rnn_mode="lstm",
                direction="bidirectional" if directions == 2 else "unidirectional",
                time_major=not batch_first,
            ).output
        return tape.gradient(output, [inputs, weights])

    found = count(step, tf.TensorSpec((2, 7, 3) if batch_first else (7, 2, 3)))
    assert found.by_dtype == {"float32": 2 * 3 * 7 * 2 * 4 * forward}
