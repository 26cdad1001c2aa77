import keras
import numpy as np
import pytest
import tensorflow as tf
from precision_nets import TOKENS, X, Y, cross_entropy, functional

from tfopt.precision import apply, check

layers = keras.layers


class Residual(layers.Layer):
    """A block of the user's that adds tensors as TensorFlow does: of one dtype."""

    def __init__(self, scale, **options):
        super().__init__(**options)
        self.inner = layers.Dense(8, name="inner")
        self.loud, self.quiet = layers.Rescaling(scale, name="loud"), layers.Rescaling(1 / scale, name="quiet")

    def call(self, x):
        return tf.add(x, self.quiet(self.loud(self.inner(x))))


@pytest.mark.slow
def test_a_block_that_does_not_take_two_dtypes_goes_back_whole():
    def body(x):
        x = Residual(1e6, name="bad")(layers.Dense(8, name="first")(x))
        return layers.Dense(3, name="head")(Residual(1.0, name="good")(x))

    model = functional(body)
    report = check(model, (X, Y), "mixed_float16")
    assert report.first_overflow == "bad/loud"
    assert report.fallback == {"net": "mixed_float16", "bad": "float32"}
    assert check(model, (X, Y), report.fallback).passed
    changed = apply(model, report.fallback).changed
    assert not any(path.startswith("bad") for path in changed)
    assert changed["good/inner"] == "mixed_float16"
    model.fit(X, Y, verbose=0)


@pytest.mark.slow
def test_attention_goes_back_as_a_whole_where_it_takes_one_dtype():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 16, name="embedding")(inputs)
    attention = layers.MultiHeadAttention(2, 8, name="attention")
    x = layers.LayerNormalization(name="norm")(attention(x, x))
    model = keras.Model(inputs, layers.Dense(20, name="head")(x), name="net")
    model.compile("adam", cross_entropy())
    attention.query_dense.kernel.assign(attention.query_dense.kernel * 1e7)
    attention.key_dense.kernel.assign(attention.key_dense.kernel * 1e-7)
    report = check(model, (TOKENS, TOKENS), "mixed_float16")
    assert report.first_overflow == "attention/query"
    assert report.fallback["attention"] == "float32"
    assert not any(path.startswith("attention/") for path in report.fallback)
    assert check(model, (TOKENS, TOKENS), report.fallback).passed


def loud(number):
    return layers.Rescaling(1e5, name=f"loud_{number}"), layers.Rescaling(1e-5, name=f"quiet_{number}")


class SumOfSquares(layers.Layer):
    """Overflows on its way to a small result, which becomes zero."""

    def call(self, x):
        return x / keras.ops.sqrt(keras.ops.sum((300 * x) ** 2, axis=-1, keepdims=True))


@pytest.mark.slow
def test_faults_behind_a_fault_are_found():
    def body(x):
        for number in range(3):
            up, down = loud(number)
            x = down(up(layers.Dense(8, name=f"dense_{number}")(x)))
        return layers.Dense(3, name="head")(layers.Dense(8, name="last")(SumOfSquares(name="norm")(x)))

    report = check(functional(body), (X, Y), "mixed_float16")
    assert not any("norm" in problem for problem in report.problems)  # behind the first fault it cannot be seen
    back = {path for path, policy in report.fallback.items() if policy == "float32"}
    assert back == {"norm", *(f"{name}_{number}" for name in ("loud", "quiet") for number in range(3))}


@pytest.mark.slow
def test_a_map_is_kept_and_excepted_from():
    up, down = loud(0)
    model = functional(lambda x: layers.Dense(3, name="head")(down(up(layers.Dense(8, name="a")(x)))))
    report = check(model, (X, Y), {"a": "mixed_bfloat16", ".*_0": "mixed_float16"})
    expected = {"a": "mixed_bfloat16", ".*_0": "mixed_float16", "loud_0": "float32", "quiet_0": "float32"}
    assert report.fallback == expected
    assert check(model, (X, Y), report.fallback).passed


@pytest.mark.slow
def test_a_layer_that_is_called_again_is_not_blamed_for_what_it_passes_on():
    def body(x):
        shared, (up, down) = layers.Dense(8, name="shared"), loud(0)
        return layers.Dense(3, name="head")(shared(down(up(shared(x)))))

    report = check(functional(body), (X, Y), "mixed_float16")
    assert report.first_overflow == "loud_0"
    assert report.problems[0].startswith("'loud_0' overflows, the first layer to do so: ")
    assert report.fallback == {"net": "mixed_float16", "loud_0": "float32", "quiet_0": "float32"}
    assert [layer.path for layer in report.layers].count("shared") == 1


def test_there_is_no_map_where_only_float32_is_left():
    up, down = loud(0)
    model = functional(lambda x: layers.Dense(3, name="head")(down(up(x))))
    report = check(model, (X, Y), "mixed_float16")
    assert not report.passed
    assert report.fallback is None


@pytest.mark.slow
def test_a_layer_with_the_models_name_is_another():
    up, down = loud(0)
    model = functional(lambda x: layers.Dense(3, name="a")(down(up(layers.Dense(8, name="b")(x)))), name="a")
    report = check(model, (X, Y), "mixed_float16")
    assert report.fallback == {"/a": "mixed_float16", "loud_0": "float32", "quiet_0": "float32"}
    assert check(model, (X, Y), report.fallback).passed

    model = functional(lambda x: layers.Dense(3)(loud(0)[1](layers.Rescaling(1e5, name="a")(x))), name="a")
    report = check(model, (X, Y), "mixed_float16")
    assert report.first_overflow == "a"
    assert report.fallback is None  # no other layer is left

    def body(x):
        return layers.Dense(3)(loud(0)[1](layers.Rescaling(1e5, name="a")(layers.Dense(8, name="b")(x))))

    report = check(functional(body, name="a"), (X, Y), "mixed_float16")
    assert report.fallback == {"/a": "mixed_float16", "a": "float32", "quiet_0": "float32"}
    assert apply(functional(body, name="a"), report.fallback).changed == {"b": "mixed_float16"}


@pytest.mark.slow
def test_constants_among_the_worst_layers_are_left_out():
    def body(x):
        constants = layers.Normalization(mean=[0.0] * 8, variance=[1.0] * 8, name="constants")
        shares = layers.Softmax(name="shares")(constants(layers.Dense(8, name="first")(x)))
        tiny = layers.Rescaling(1e-9, name="tiny")(shares)
        return layers.Dense(3, name="head")(layers.Add(name="add")([tiny, layers.Dense(8, name="main")(x)]))

    report = check(functional(body), (X, Y), "mixed_float16")
    assert not report.passed
    assert report.fallback is not None
    assert "constants" not in report.fallback
    assert check(functional(body), (X, Y), report.fallback).passed
    apply(functional(body), report.fallback)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["GRU", "LSTM", "SimpleRNN"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_recurrent_layer_goes_back_with_its_cell(kind, wrapped):
    keras.utils.set_random_seed(1)
    rnn = getattr(layers, kind)(3, name="rnn")
    inputs = keras.Input((5, 8))
    x = layers.Bidirectional(rnn, name="both")(inputs) if wrapped else rnn(inputs)
    x = layers.Dense(4, name="body")(x)
    model = keras.Model(inputs, layers.Dense(3, name="head")(x), name="net")
    model.compile("sgd", cross_entropy())
    recurrent = model.get_layer("both").backward_layer if wrapped else model.get_layer("rnn")
    recurrent.cell.kernel.assign(recurrent.cell.kernel * 3e5)  # overflows inside the cell
    report = check(model, (np.repeat(X[:, None], 5, 1), Y), "mixed_float16")
    path = "both/backward_rnn" if wrapped else "rnn"
    assert report.problems[0].endswith(f"Put all of '{path}' into it: a cell needs its layer's dtype.")
    apply(model, report.fallback)
    assert recurrent.compute_dtype == recurrent.cell.compute_dtype == "float32"
    assert model.get_layer("body").compute_dtype == "float16"
