"""Activations computed again: the same training, in less memory."""

import functools

import keras
import numpy as np
import pytest
import recomputed_nets as nets
import tensorflow as tf
from quick import first_quick
from recomputed_nets import IDS, VALUES, assert_same, compared, layers, made, trained

import tfopt
from tfopt.bench.workloads import gpt2
from tfopt.hardware.gpu_memory import first_gpu, in_use_bytes, peak_bytes, reset_peak
from tfopt.memory import recompute, undo

ops = keras.ops


@pytest.fixture(autouse=True)
def _as_traced():
    with nets.as_traced():
        yield


def dense(activation="gelu", count=3, size=6):
    row = [layers.Dense(width, activation=one) for _ in range(count) for width, one in ((24, activation), (size, None))]
    return keras.Sequential([keras.Input((6,)), *row, layers.Dense(20, activation="softmax")])


def by_operation():
    """GPT-2's form: an operation between two layers. Two layers and an operation read the last one's result."""
    inputs = outputs = keras.Input((6,))
    for activate in (functools.partial(ops.gelu, approximate=True), ops.silu, ops.softplus):
        inner = activate(layers.Dense(24)(outputs))
        outputs = outputs + layers.Dense(6)(inner)
    outputs = outputs + layers.Dense(6)(inner) + ops.mean(inner)
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(outputs))


def dropped():
    """Dropout hides the activation from the layer behind it."""
    row = [
        layer for _ in range(3) for layer in (layers.Dense(24, activation="gelu"), layers.Dropout(0.2), layers.Dense(6))
    ]
    return keras.Sequential([keras.Input((6,)), *row, layers.Dense(20, activation="softmax")])


def convolutional():
    rows = [
        (layers.Conv1D(8, 3, padding="same"), layers.LeakyReLU()),
        (layers.SeparableConv1D(8, 3, padding="same", activation="mish"),),
        (layers.Conv1DTranspose(8, 3, padding="same", activation="silu"), layers.Dropout(0.2)),
        (layers.DepthwiseConv1D(3, padding="same"), layers.BatchNormalization(), layers.Activation("softplus")),
    ]
    row = [layer for block in rows for layer in block]
    return keras.Sequential([keras.Input((6,)), layers.Embedding(20, 8), *row, layers.Dense(20, activation="softmax")])


class Gated(layers.Layer):
    """A gated perceptron with its activation in float32, as those of language models have."""

    def __init__(self):
        super().__init__()
        self.activation = layers.Activation("silu", dtype="float32")
        self.gate, self.up = layers.Dense(16), layers.Dense(16)
        self.down = layers.EinsumDense("ab,bc->ac", 6)

    def build(self, shape):
        self.gate.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 16))

    def call(self, inputs):
        gate = ops.cast(self.activation(self.gate(inputs)), self.compute_dtype)
        return inputs + self.down(gate * self.up(inputs))


def gated():
    return keras.Sequential([keras.Input((6,)), Gated(), Gated(), layers.Dense(20, activation="softmax")])


def activations(model):
    return "activations"


NETS = [(dense, 3), (by_operation, 3), (convolutional, 4), (gated, 2), (nets.functional, 2), (nets.branched, 6)]


@pytest.mark.parametrize(("make", "count"), first_quick(NETS, 2))
def test_trains_the_same(make, count):
    # Gradients of several uses of a tensor add up in another order.
    model = compared(make, activations, tolerance=0 if make is dense else 1e-5)
    assert undo(model) == count
    assert not any({"call", "_tfopt_recomputed"} & vars(layer).keys() for layer in model._flatten_layers())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "policy", "rounding"),
    [
        (dense, "float32", 1e-5),
        (by_operation, "mixed_bfloat16", 0.1),
        (convolutional, "mixed_float16", 0.01),
        (gated, "mixed_bfloat16", 0.02),
    ],
)
def test_trains_the_same_in_any_precision_under_xla(make, policy, rounding):
    keras.config.set_dtype_policy(policy)
    compared(make, activations, jit_compile=True, tolerance=rounding)


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("make", "values"), [(dense, 2), (by_operation, 1), (dropped, 1)])
def test_keeps_what_goes_into_them_alone(make, values, jit_compile):
    """A result need not be kept but where dropout follows; a GELU and a SiLU also compute something on the way."""
    examples, width = 4096, 24
    batch = tf.TensorSpec((examples, 6)), tf.TensorSpec((examples,), tf.int32)
    model = made(functools.partial(make, "gelu") if make is dense else make, jit_compile=jit_compile)
    before = tfopt.memory.estimate(model, batch)
    count = recompute(model, "activations")
    after = tfopt.memory.estimate(model, batch)
    one = examples * width * 4 / 2**20
    # The last one's gradient is computed while the others are kept.
    assert before.activations_mib - after.activations_mib >= values * (count - 1) * one
    assert after.total_mib < before.total_mib


@pytest.mark.gpu
def test_a_gpu_needs_less_memory():
    blocks, width, examples, length = 6, 512, 8, 512
    batch = gpt2.batch(examples, length=length, vocabulary=1024)
    peaks, losses = [], []
    for recomputed in (False, True):
        keras.utils.set_random_seed(0)
        with tfopt.precision.policy("mixed_bfloat16"):
            model = gpt2.model(blocks=blocks, width=width, heads=8, vocabulary=1024, length=length, jit_compile=True)
        tfopt.kernels.use_flash_attention(model)
        if recomputed:
            assert recompute(model, "activations") == blocks
        losses.append([float(model.train_on_batch(*batch)) for _ in range(3)])
        before = in_use_bytes(first_gpu())
        reset_peak(first_gpu())
        model.train_on_batch(*batch)
        peaks.append(peak_bytes(first_gpu()) - before)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    one = 2 * examples * length * 4 * width  # bytes of a GELU's result
    assert peaks[0] - peaks[1] >= 2 * (blocks - 1) * one


def test_each_is_kept_once_where_nothing_but_its_output_is_needed():
    model = made(functools.partial(dense, "relu"))
    with pytest.raises(ValueError, match=r"activations that keep more than their output.*in which no layer has one"):
        recompute(model, "activations")


@pytest.mark.slow
def test_as_few_as_a_budget_requires():
    batch = tf.TensorSpec((4096, 6)), tf.TensorSpec((4096,), tf.int32)
    model = made(dense)
    most = tfopt.memory.estimate(model, batch).total_mib
    recompute(model, "activations")
    least = tfopt.memory.estimate(model, batch).total_mib
    assert recompute(model, "activations", budget_mib=(most + least) / 2, batch=batch) in (1, 2)
    assert least < tfopt.memory.estimate(model, batch).total_mib <= (most + least) / 2
    assert recompute(model, "activations", budget_mib=most, batch=batch) == 0
    with pytest.raises(ValueError, match="Expected a budget"):
        recompute(model, "activations", budget_mib=least / 2, batch=batch)


class Own(layers.Layer):
    """An activation between two dense layers, or used as a function says."""

    def __init__(self, activation=ops.silu, function=lambda own, x: own.down(own.activation(own.up(x)))):
        super().__init__()
        self.activation, self.function = layers.Activation(activation), function
        self.seeds = keras.random.SeedGenerator(3)
        self.up, self.down = layers.Dense(6), layers.Dense(6)

    def build(self, shape):
        self.up.build(shape)
        self.down.build(shape)

    def call(self, x):
        return self.function(self, x)


class Drawing(Own):
    def __init__(self):
        super().__init__(lambda x: ops.silu(x) * keras.random.uniform(ops.shape(x), seed=self.seeds))


class Penalized(Own):
    def __init__(self):
        super().__init__(self.penalized)

    def penalized(self, x):
        self.add_loss(ops.mean(x**2))
        return ops.silu(x)


class Shifted(Own):
    def __init__(self):
        super().__init__(lambda x: ops.silu(x + self.shift))

    def call(self, x):
        self.shift = self.up(x)
        return self.down(self.activation(x))


class Inside(Own):
    def __init__(self):
        super().__init__()
        self.inner = Own()

    def build(self, shape):
        super().build(shape)
        self.inner.build(shape)

    def call(self, x):
        return super().call(self.inner(x=x))


class Doubled(layers.Dense):
    def call(self, inputs):
        return 2 * super().call(inputs)


class Squared(layers.Dense):
    def call(self, inputs):
        return ops.square(self.activation(ops.matmul(inputs, self.kernel)))


class Sloped(layers.LeakyReLU):
    def call(self, inputs, training=None):
        return super().call(inputs) * (2 if training else 1)


def patched():
    layer = layers.Dense(6, activation="gelu")
    plain = layer.call
    object.__setattr__(layer, "call", lambda *args, **kwargs: 2 * plain(*args, **kwargs))
    return layer


OWN = {
    "of a Dense with another call set on it": patched,
    "of a Dense that goes on after it": lambda: Doubled(6, activation="gelu"),
    "of a Dense that applies it earlier": lambda: Squared(6, activation="gelu"),
    "of a LeakyReLU that does more": Sloped,
    "of a layer called by the name of its argument": Inside,
    "that draws": Drawing,
    "that adds a loss": Penalized,
    "of another tensor": Shifted,
    "with two results": lambda: Own(lambda x: (ops.silu(x), x), lambda own, x: ops.add(*own.activation(own.up(x)))),
}


@pytest.mark.parametrize("own", first_quick(OWN, 2))
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_keeps_to_what_a_layer_does_with_its_activation(own):
    def make():
        between = [layers.Dense(6, activation="gelu"), OWN[own](), layers.Dense(6)]
        return keras.Sequential([keras.Input((6,)), *between, layers.Dense(20, activation="softmax")])

    compared(make, activations, tolerance=1e-5)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_an_activation_may_be_taken_away():
    def without(model):
        model.layers[0].activation = model.layers[2].activation = None
        return model

    def make():
        inner = [layers.Dense(6, activation="gelu"), layers.Dense(6), layers.Dense(6, activation="silu")]
        return keras.Sequential([keras.Input((6,)), *inner, layers.Dense(20, activation="softmax")])

    compared(make, activations, tolerance=1e-6, prepare=without)


PLACES = {
    "while": lambda own, x, inner: ops.fori_loop(0, 2, lambda _, y: y + own.down(inner), x),
    "map": lambda own, x, inner: ops.map(lambda y: own.down(inner)[0] + y, x),
    "cond": lambda own, x, inner: ops.cond(ops.sum(x) > 0, lambda: own.down(inner), lambda: own.down(own.up(inner))),
    "function": lambda own, x, inner: tf.function(lambda y: own.down(own.activation(y)) + own.down(inner))(x),
}


@pytest.mark.parametrize("place", first_quick(PLACES, 1))
def test_loops_branches_and_functions_may_use_what_was_activated_outside(place):
    def make():
        own = Own(function=lambda own, x: PLACES[place](own, x, own.activation(own.up(x))))
        return keras.Sequential([keras.Input((6,)), own, layers.Dense(20, activation="softmax")])

    compared(make, activations, tolerance=1e-5)


class Looping(layers.Layer):
    """Has activations in a loop, and before it one whose result is taken inside."""

    def __init__(self):
        super().__init__()
        self.activation = layers.Activation("gelu")
        self.first, self.up = layers.Dense(12, activation="mish"), layers.Dense(12, activation="silu")
        self.down, self.outside = layers.Dense(6), layers.Dense(6)

    def build(self, shape):
        for layer in (self.first, self.up):
            layer.build((None, 6))
        for layer in (self.down, self.outside):
            layer.build((None, 12))

    def call(self, inputs):
        before = self.first(inputs)

        def body(step, state):
            return step + 1, state + self.down(self.up(self.activation(state))) + self.outside(before)

        return ops.while_loop(lambda step, state: step < 3, body, (0, inputs), maximum_iterations=3)[1]


def recurrent():
    inputs = keras.Input((6,))
    outputs = layers.Embedding(20, 8)(inputs)
    outputs = layers.GRU(8, activation="silu", return_sequences=True, reset_after=False)(outputs)
    outputs = layers.TimeDistributed(layers.Dense(8, activation="gelu"))(outputs)
    return keras.Model(inputs, layers.Dense(20, activation="softmax")(outputs))


def looping():
    return keras.Sequential([keras.Input((6,)), Looping(), layers.Dense(20, activation="softmax")])


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("make", [recurrent, looping])
def test_loops_keep_theirs(make, jit_compile):
    compared(make, activations, jit_compile=jit_compile, tolerance=1e-5)


@pytest.mark.slow
def test_works_with_what_else_changes_a_model():
    compared(convolutional, activations, prepare=tfopt.fit.overlap, tolerance=1e-6)


def test_only_training_computes_them_again(tmp_path):
    runs = []

    def counted(x):
        runs.append(x)
        return ops.gelu(x)

    model = made(functools.partial(dense, counted, count=1))
    model.train_on_batch(VALUES, IDS[:, 0])
    expected = model.predict(VALUES, verbose=0)
    assert recompute(model, "activations") == 1
    runs.clear()
    assert_same([model.predict(VALUES, verbose=0)], [expected])
    assert len(runs) == 1
    runs.clear()
    model.train_on_batch(VALUES, IDS[:, 0])
    # To see that it does nothing else, for whatever else reads its result, which is nothing, for the layer behind it,
    # and for the gradient of that.
    assert len(runs) == 4
    with_gelu = made(functools.partial(dense, "gelu", count=1))
    recompute(with_gelu, "activations")
    trained(with_gelu)
    with_gelu.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(VALUES, verbose=0), with_gelu.predict(VALUES, verbose=0))
    assert undo(loaded) == 0
