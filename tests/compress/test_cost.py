import json
import re
from dataclasses import replace
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.compress import cost, costing, distil, prune, quantize, suggest
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.measure import StepTimer

layers, ops = keras.layers, keras.ops
BATCH = 3


def alone(compiled, batch, layer, *shapes, dtype="float32"):
    """The cost of a layer whose inputs, where they are floats, have a gradient."""
    inputs = [keras.Input(shape, dtype=dtype) for shape in shapes]
    before = [layers.PReLU()(one) if dtype == "float32" else one for one in inputs]
    model = compiled(keras.Model(inputs, layer(before if len(before) > 1 else before[0])))
    return cost(model, batch(*shapes, dtype=dtype)).layers[-1]


class Attend(layers.Layer):
    """Calls an attention layer on two inputs, as no Sequential model can."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def call(self, inputs):
        return self.attention(inputs[0], inputs[1])


def attention(layer, *shapes):
    return Attend(layer), *shapes


# A layer, the shapes of its inputs, its multiply-adds forward on one example, and its parameters, all by hand.
BY_HAND = [
    (layers.Dense(5), [(7, 4)], 7 * 4 * 5, 4 * 5 + 5),
    (layers.EinsumDense("abc,cde->abde", (None, 2, 5), bias_axes="de"), [(7, 4)], 7 * 4 * 10, 4 * 10 + 10),
    (layers.Conv1D(6, 3), [(8, 4)], 6 * 3 * 4 * 6, 3 * 4 * 6 + 6),
    (layers.Conv2D(6, 3, strides=2, padding="same"), [(8, 8, 4)], 16 * 9 * 4 * 6, 9 * 4 * 6 + 6),
    (layers.Conv2D(6, 3, groups=2, use_bias=False), [(8, 8, 4)], 36 * 9 * 2 * 6, 9 * 2 * 6),
    (layers.Conv3D(2, 3), [(4, 5, 6, 3)], 2 * 3 * 4 * 27 * 3 * 2, 27 * 3 * 2 + 2),
    (layers.Conv1DTranspose(6, 3, strides=2), [(8, 4)], 8 * 3 * 4 * 6, 3 * 4 * 6 + 6),
    (layers.Conv2DTranspose(6, 3), [(8, 8, 4)], 64 * 9 * 4 * 6, 9 * 4 * 6 + 6),
    (layers.Conv3DTranspose(2, 2), [(3, 4, 5, 3)], 60 * 8 * 3 * 2, 8 * 3 * 2 + 2),
    (layers.DepthwiseConv1D(3, depth_multiplier=2), [(8, 4)], 6 * 3 * 8, 3 * 8 + 8),
    (layers.DepthwiseConv2D(3), [(8, 8, 4)], 36 * 9 * 4, 9 * 4 + 4),
    (layers.SeparableConv1D(5, 3), [(8, 4)], 6 * (3 * 4 + 4 * 5), 3 * 4 + 4 * 5 + 5),
    (layers.SeparableConv2D(5, 3), [(8, 8, 4)], 36 * (9 * 4 + 4 * 5), 9 * 4 + 4 * 5 + 5),
    (layers.Embedding(100, 8), [(6,)], 0, 100 * 8),
    (layers.BatchNormalization(), [(8, 4)], 0, 4 * 4),
    (layers.LayerNormalization(), [(8, 4)], 0, 2 * 4),
    (layers.GroupNormalization(2), [(8, 4)], 0, 2 * 4),
    (layers.RMSNormalization(), [(8, 4)], 0, 4),
    (layers.PReLU(shared_axes=[1]), [(8, 4)], 0, 4),
    (layers.LSTM(5), [(7, 4)], 7 * 4 * (4 * 5 + 5 * 5), 4 * (4 * 5 + 5 * 5 + 5)),
    (layers.GRU(5), [(7, 4)], 7 * 3 * (4 * 5 + 5 * 5), 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (layers.SimpleRNN(5), [(7, 4)], 7 * (4 * 5 + 5 * 5), 4 * 5 + 5 * 5 + 5),
    (layers.RNN(layers.LSTMCell(5)), [(7, 4)], 7 * 4 * (4 * 5 + 5 * 5), 4 * (4 * 5 + 5 * 5 + 5)),
    (layers.RNN(layers.GRUCell(5)), [(7, 4)], 7 * 3 * (4 * 5 + 5 * 5), 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (
        layers.RNN(layers.StackedRNNCells([layers.SimpleRNNCell(5), layers.SimpleRNNCell(6)])),
        [(7, 4)],
        7 * (4 * 5 + 5 * 5 + 5 * 6 + 6 * 6),
        4 * 5 + 5 * 5 + 5 + 5 * 6 + 6 * 6 + 6,
    ),
    (layers.Bidirectional(layers.GRU(5)), [(7, 4)], 2 * 7 * 3 * (4 * 5 + 5 * 5), 2 * 3 * (4 * 5 + 5 * 5 + 2 * 5)),
    (layers.TimeDistributed(layers.Dense(5)), [(7, 4)], 7 * 4 * 5, 4 * 5 + 5),
    (layers.ConvLSTM1D(2, 3), [(4, 8, 3)], 4 * 4 * 6 * 3 * (3 + 2) * 2, 4 * (3 * (3 + 2) * 2 + 2)),
    (layers.ConvLSTM2D(2, 3), [(4, 8, 8, 3)], 4 * 4 * 36 * 9 * (3 + 2) * 2, 4 * (9 * (3 + 2) * 2 + 2)),
    (layers.ConvLSTM3D(2, 3), [(2, 4, 4, 4, 3)], 2 * 4 * 8 * 27 * (3 + 2) * 2, 4 * (27 * (3 + 2) * 2 + 2)),
    (layers.Attention(use_scale=True), [(7, 4), (9, 4)], 2 * 7 * 9 * 4, 1),
    (layers.AdditiveAttention(), [(7, 4), (9, 4)], 7 * 9 * 4, 4),
    (
        Attend(layers.MultiHeadAttention(2, 3)),
        [(7, 4), (9, 4)],
        7 * 4 * 6 + 2 * 9 * 4 * 6 + 2 * 7 * 9 * 6 + 7 * 6 * 4,
        3 * (4 * 6 + 6) + 6 * 4 + 4,
    ),
    (
        Attend(layers.GroupQueryAttention(3, 4, 2)),
        [(7, 4), (9, 4)],
        7 * 4 * 12 + 2 * 9 * 4 * 6 + 2 * 7 * 9 * 12 + 7 * 12 * 4,
        (4 * 12 + 12) + 2 * (4 * 6 + 6) + 12 * 4 + 4,
    ),
]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("layer", "shapes", "multiply_adds", "parameters"),
    first_quick(BY_HAND, 6),
    ids=[type(layer).__name__ for layer, *_ in BY_HAND],
)
def test_counts_agree_with_formulas_by_hand(compiled, batch, layer, shapes, multiply_adds, parameters):
    found = alone(compiled, batch, layer, *shapes, dtype="int32" if isinstance(layer, layers.Embedding) else "float32")
    assert found.unknown == ()
    assert (found.forward_flops, found.backward_flops) == (
        2 * BATCH * multiply_adds,
        4 * BATCH * multiply_adds,  # the gradients of the inputs and of the weights
    )
    assert found.parameters == parameters


@pytest.mark.usefixtures("quick")
def test_a_row_for_each_call_in_nested_and_shared_layers(compiled, batch):
    shared = layers.Dense(4, name="shared")
    inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="deep"), shared], name="inner")
    inputs = keras.Input((4,))
    model = compiled(keras.Model(inputs, layers.Add(name="sum")([inner(inputs), shared(inner(inputs))])))
    found = cost(model, batch((4,)))
    assert [layer.path for layer in found.layers] == [
        "inner/deep",
        "inner/shared",
        "inner/deep (2)",
        "inner/shared (2)",
        "inner/shared (3)",
        "sum",
    ]
    assert [layer.parameters for layer in found.layers] == [20, 20, 0, 0, 0, 0]
    assert found.parameters == model.count_params()
    # The data have no gradient, so the first layer computes that of its weights alone.
    assert [layer.backward_flops // layer.forward_flops for layer in found.layers[:5]] == [1, 2, 1, 2, 2]


@pytest.mark.usefixtures("quick")
def test_bytes_are_those_that_must_be_moved(compiled, batch):
    inputs = keras.Input((8,))
    frozen = layers.Dense(4, name="frozen", trainable=False)
    model = compiled(keras.Model(inputs, layers.Dense(2)(layers.PReLU()(frozen(inputs)))))
    first, middle, last = cost(model, batch((8,))).layers
    taken, weights, given = BATCH * 8, 8 * 4 + 4, BATCH * 4
    assert (first.forward_bytes, first.backward_bytes) == (4 * (taken + weights + given), 0)
    # Read: the gradient of the output, the input and the weights. Written: the gradients of these.
    assert middle.forward_bytes == 4 * (12 + 4 + 12)
    assert middle.backward_bytes == 4 * (12 + 12 + 4)  # what comes before is frozen
    assert last.forward_bytes == 4 * (12 + 10 + 6)
    assert last.backward_bytes == 4 * (6 + 12 + 10 + 12 + 10)
    assert last.intensity == 2 * 3 * BATCH * 4 * 2 / (last.forward_bytes + last.backward_bytes)


@pytest.mark.usefixtures("quick")
def test_an_embedding_moves_the_rows_that_are_looked_up(compiled, batch):
    model = compiled(keras.Sequential([keras.Input((5,), dtype="int32"), layers.Embedding(1000, 4)]))
    (found,) = cost(model, batch((5,), dtype="int32")).layers
    rows = BATCH * 5 * 4 * 4
    assert found.forward_bytes == BATCH * 5 * 4 + rows + rows
    assert found.backward_bytes == rows + BATCH * 5 * 4 + rows


class Tokens(keras.Model):
    """Embeds tokens, and gives logits by the same layer."""

    def __init__(self, **options):
        super().__init__()
        self.tokens = layers.ReversibleEmbedding(100, 4, **options)

    def call(self, inputs):
        return self.tokens(self.tokens(inputs), reverse=True)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("tied", [True, False])
def test_an_embedding_in_reverse_moves_its_whole_table(compiled, batch, tied):
    model = compiled(Tokens(tie_weights=tied, dtype="mixed_bfloat16", reverse_dtype="float32"))
    x, _ = batch((5,), dtype="int32")
    model(x)  # without StepTimer nothing builds it
    there, back = cost(model, (x, x)).layers
    tokens, vectors, table, logits = BATCH * 5, BATCH * 5 * 4, 100 * 4, BATCH * 5 * 100
    assert there.forward_bytes == 4 * tokens + 4 * vectors + 2 * vectors  # the rows are float32, the outputs bfloat16
    assert there.backward_bytes == 2 * vectors + 4 * tokens + 4 * vectors
    assert back.forward_bytes == 2 * vectors + 4 * table + 4 * logits
    assert back.backward_bytes == 4 * logits + 2 * vectors + 4 * table + 2 * vectors + 4 * table
    assert (there.dtype, back.dtype) == ("bfloat16", "float32")  # that of the product
    assert back.least_products_ms == back.flops / 1e9


@pytest.mark.usefixtures("quick")
def test_an_input_taken_twice_is_moved_once(compiled, batch):
    inputs = keras.Input((8,))
    dense = layers.Dense(4)(inputs)
    found = cost(compiled(keras.Model(inputs, layers.Multiply()([dense, dense]))), batch((8,))).layers[1]
    assert (found.forward_bytes, found.backward_bytes) == (4 * (12 + 12), 4 * (12 + 12 + 12))


@pytest.mark.usefixtures("quick")
def test_outputs_and_inputs_of_open_shapes(compiled):
    class Picked(layers.Layer):
        def call(self, inputs):
            return tf.boolean_mask(inputs.to_tensor(), [True, False, True])

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.picked, self.dense = Picked(name="picked"), layers.Dense(2, name="dense")

        def call(self, inputs):
            return self.dense(tf.reshape(self.picked(inputs), (2, 3)))

    model = compiled(Net(), jit_compile=False)
    x = tf.ragged.constant([[1.0, 2.0], [3.0], [4.0, 5.0, 6.0]])
    model(x)
    data = tf.data.Dataset.from_tensors((x, [0.0] * 3))
    picked = cost(model, data).layers[0]
    assert picked.ms is not None
    assert picked.inputs == ((3, None),)
    assert picked.forward_bytes == 4 * 6 + 8 * 4 + 4 * 2 * 3  # values, int64 row splits, outputs
    assert suggest(model, data).without == ("picked", "dense")


@pytest.mark.usefixtures("quick")
def test_precisions_without_a_measured_rate_have_no_ceiling(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(costing, "_RATED", ("float32",))
    model = compiled(
        keras.Sequential([keras.Input((8,), dtype="float64"), layers.Dense(4, dtype="float64", name="wide")])
    )
    found = cost(model, (tf.zeros((3, 8), "float64"), tf.zeros(3)))
    (dense,) = found.layers
    assert (dense.dtype, dense.least_products_ms, dense.attained, dense.bound_by) == ("float64", None, None, None)
    assert found.matmul_tflops == {}
    said = " ".join(str(found).split())
    assert "since no rate of products in their precision is measured: wide (float64)." in said
    html = found.to_html(tmp_path / "cost.html").read_text(encoding="utf-8")
    assert "<circle" in html
    assert "of the step, None" not in html


class Calling(keras.Model):
    """Calls layers as no Functional model does."""

    def __init__(self, call, **parts):
        super().__init__()
        self._call = call
        for name, part in parts.items():
            setattr(self, name, part)

    def call(self, inputs):
        return self._call(self, inputs)


class Around(layers.Layer):
    """Has no config: what it calls may be anything."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, inputs):
        return self.inner(inputs)


class Powers(layers.Layer):
    def call(self, inputs):
        for _ in range(*self._times):
            inputs = inputs @ ops.transpose(inputs) @ inputs
        return inputs


def powers(times):
    layer = Powers()
    layer._times = [times]  # which is not in its config
    return layer


def shared_inside():
    dense = layers.Dense(8)
    return Calling(lambda self, x: self.around(self.dense(x)), dense=dense, around=Around(dense))


def two_shapes():
    parts = {"dense": layers.Dense(4), "around": Around(lambda x: x @ ops.transpose(x))}

    def call(self, inputs):
        hidden = self.dense(inputs)
        return self.around(hidden) + self.around(hidden[:, :2])

    return Calling(call, **parts)


def own_weight():
    model = Calling(lambda self, x: self.dense(x * self.scale), dense=layers.Dense(2))
    model.scale = model.add_weight((8,), "ones")
    return model


def complex_between():
    parts = {"first": layers.Dense(8), "fft": layers.Lambda(tf.signal.rfft), "size": layers.Lambda(abs)}
    return Calling(lambda self, x: self.last(self.size(self.fft(self.first(x)))), **parts, last=layers.Dense(2))


def integers_between():
    def call(self, inputs):
        hidden = self.first(inputs)
        # A choice has no gradient, so the last layer computes none of its inputs.
        return hidden[:, :2] + self.last(tf.one_hot(tf.argmax(hidden, -1), 8))

    return Calling(call, first=layers.Dense(8), last=layers.Dense(2))


def gradient_stopped():
    def call(self, inputs):
        hidden = self.first(inputs)
        return hidden[:, :2] + self.last(ops.stop_gradient(hidden))

    return Calling(call, first=layers.Dense(8), last=layers.Dense(2))


def gradient_stopped_inside():
    stopped = layers.Lambda(ops.stop_gradient)

    def call(self, inputs):
        hidden = self.first(inputs)
        return hidden[:, :2] + self.last(self.stopped(hidden))

    return Calling(call, first=layers.Dense(8), stopped=stopped, last=layers.Dense(2))


def shared_without_weights():
    parts = {"first": layers.Dense(8), "relu": layers.ReLU(), "last": layers.Dense(8), "beside": layers.Dense(8)}
    return Calling(lambda self, x: self.last(self.relu(self.first(x))) + self.beside(self.relu(x)), **parts)


def unlike_attributes():
    parts = {"first": layers.Dense(8), "one": powers(1), "two": powers(2)}
    return Calling(lambda self, x: self.two(self.one(self.first(x))), **parts)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "make",
    [
        *(shared_inside, two_shapes, own_weight, complex_between, integers_between, gradient_stopped),
        *(gradient_stopped_inside, shared_without_weights, unlike_attributes),
    ],
)
def test_the_layers_of_odd_models_add_up_to_the_step(compiled, batch, monkeypatch, make):
    monkeypatch.setattr(costing, "StepTimer", StepTimer)
    model = compiled(make(), jit_compile=False)
    found = cost(model, batch((8,)))
    assert found.flops == found.step_flops > 0
    own = sum(np.prod(weight.shape) for weight in model._trainable_variables)
    assert found.parameters == model.count_params() - own


@pytest.mark.usefixtures("quick")
def test_products_outside_of_layers_are_said(compiled, batch, monkeypatch):
    monkeypatch.setattr(costing, "StepTimer", StepTimer)
    model = Calling(lambda self, x: self.dense(x) @ ops.transpose(self.dense.kernel), dense=layers.Dense(4))
    found = cost(compiled(model), batch((8,)))
    products = 2 * BATCH * 8 * 4
    assert (found.flops, found.step_flops) == (2 * products, 5 * products)
    assert "MFLOP more than these layers: in the loss, the model's own code," in " ".join(str(found).split())
    inputs = keras.Input((8,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(4)(inputs)])
    model.compile("sgd", ["mse", None])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        found = cost(model, (tf.zeros((3, 8)), (tf.zeros((3, 2)), None)))
    assert found.step_flops == found.flops - 2 * products
    assert "MFLOP less than these layers," in " ".join(str(found).split())


@pytest.mark.usefixtures("quick")
def test_each_layer_is_bound_by_its_higher_ceiling(compiled, batch, monkeypatch):
    model = compiled(keras.Sequential([keras.Input((64,)), layers.Dense(64), layers.ReLU()]))
    data = batch((64,))
    dense, relu = cost(model, data).layers
    assert (dense.bound_by, relu.bound_by) == ("neither", "neither")  # 4 ms are far above both
    monkeypatch.setattr(costing, "matmul_tflops", lambda dtype: 1e-9)
    monkeypatch.setattr(costing, "copy_gib_per_second", lambda: 1e-4)
    dense, relu = cost(model, data).layers
    flops = 2 * 2 * BATCH * 64 * 64
    assert dense.least_products_ms == pytest.approx(1000 * flops / 1e3)
    assert dense.least_memory_ms == pytest.approx(1000 * (dense.forward_bytes + dense.backward_bytes) / (1e-4 * 2**30))
    assert (dense.bound_by, relu.bound_by) == ("products", "memory")
    assert dense.attained == dense.least_products_ms / 2.0


@pytest.mark.usefixtures("quick")
def test_shares_are_of_the_step_or_of_all_layers(compiled, batch, steps_take):
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(2)]))
    found = cost(model, batch((4,)))
    assert (found.layers_ms, found.step_ms, found.rest_ms) == (4.0, 30.0, 26.0)
    assert found.share(found.layers[0]) == 2 / 30
    steps_take(3.0)
    found = cost(model, batch((4,)))
    assert (found.rest_ms, found.share(found.layers[0])) == (0.0, 0.5)
    assert "The whole step takes less" in str(found)


class Doubled(layers.Layer):
    def call(self, inputs):
        return inputs @ inputs


class OnlyInside(layers.Layer):
    """Does not run outside of its model."""

    inside = True

    def call(self, inputs):
        if not self.inside:
            raise RuntimeError("outside")
        return inputs + 0.0


@pytest.mark.usefixtures("quick")
def test_custom_layers_are_counted_in_their_graph_and_marked(compiled, batch):
    model = compiled(
        keras.Sequential([keras.Input((4, 4)), layers.Dense(4), Doubled(), layers.Lambda(lambda x: x * 2)])
    )
    found = cost(model, batch((4, 4)))
    dense, doubled, scaled = found.layers
    assert (doubled.own, doubled.forward_flops, doubled.backward_flops) == (True, 2 * BATCH * 64, 4 * BATCH * 64)
    assert (dense.own, scaled.own, scaled.flops) == (False, False, 0)
    assert "doubled*" in str(found)


@pytest.mark.usefixtures("quick")
def test_a_layer_that_does_not_run_alone_is_named(compiled, batch, monkeypatch):
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(4), OnlyInside(name="shy")]))
    measure = costing._measure

    def outside(*arguments):
        monkeypatch.setattr(OnlyInside, "inside", False)
        return measure(*arguments)

    monkeypatch.setattr(costing, "_measure", outside)
    found = cost(model, batch((4,)))
    assert (found.layers[1].ms, found.layers[1].bound_by) == (None, None)
    said = " ".join(str(found).split())
    assert "The timed layers, each alone: 2 ms forward and backward. The rest of the step, 28 ms," in said
    assert "what is in no layer, and the layers that are not timed." in said
    assert "Not timed, since they do not run outside of the model: shy (in OnlyInside.call(). outside)." in said
    json.dumps(found.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("quick")
def test_a_step_of_which_no_layer_is_timed(compiled, batch, monkeypatch, tmp_path):
    model = compiled(keras.Sequential([keras.Input((4,)), OnlyInside(name="shy")], name="net"))
    monkeypatch.setattr(costing, "outputs", lambda *_: OnlyInside.undefined)
    found = cost(model, batch((4,)))
    assert found.verdict == (
        "net at batch size 3 takes 30 ms a step; what its layers take of it is unknown, since none of them runs alone."
    )
    assert found.verdict in found.to_html(tmp_path / "cost.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("quick")
def test_the_roof_begins_inside_the_chart(compiled, batch, tmp_path):
    found = cost(compiled(keras.Sequential([keras.Input((4,)), layers.Dense(4)])), batch((4,)))
    speed = {"forward_flops": 900, "backward_flops": 0, "forward_ms": 900 / 1.2e9, "backward_ms": 0.0}  # 1,200 GFLOP/s
    dense = replace(found.layers[0], forward_bytes=100, backward_bytes=0, **speed)
    # 9 FLOP/byte: the slope reaches 150 GFLOP/s at 1 FLOP/byte, and the chart begins at 1,000.
    found = replace(found, layers=(dense,), matmul_tflops={"float32": 2.0}, copy_gib_per_second=150e9 / 2**30)
    html = found.to_html(tmp_path / "cost.html").read_text(encoding="utf-8")
    (start,) = re.findall(r'<path d="M[\d.]+ ([\d.]+)L', html)
    assert float(start) == 460 - 44  # the floor


@pytest.mark.usefixtures("quick")
def test_nothing_of_the_model_changes(compiled, batch):
    stack = [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Dropout(0.5)]
    model = compiled(keras.Sequential([*stack, layers.Flatten(), layers.Dense(2)]))
    before = [variable.numpy() for variable in model.variables]
    cost(model, batch((8, 8, 3)))
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert model.losses == []


@pytest.mark.slow
def test_what_is_measured_is_shown(compiled, batch, tmp_path):
    model = compiled(keras.Sequential([keras.Input((16,)), layers.Dense(10, name="wide"), layers.ReLU()], name="net"))
    found = cost(model, batch((16,)))
    assert found.layers[0].ms > 0 < found.step_ms
    assert "outputs 10 → 12" in " ".join(str(found).split())
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["layers"][0]["path"] == "wide"
    html = found.to_html(tmp_path / "cost.html").read_text(encoding="utf-8")
    assert "<circle" in html
    assert "What net costs" in html


class Own(keras.Model):
    """Has layers, is built by its first call, and adds losses."""

    def __init__(self):
        super().__init__()
        self.wide = layers.Dense(4, kernel_regularizer="l2", name="wide")
        self.last = layers.ActivityRegularization(0.1, name="last")

    def call(self, inputs, training=False):
        return self.last(self.wide(inputs) if training else self.wide(inputs) * 2)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("loss", [lambda y, output: ops.mean(output), None])
def test_a_subclassed_model_with_regularizers_that_is_not_built(batch, loss, monkeypatch):
    monkeypatch.setattr(costing, "StepTimer", StepTimer)  # which builds it
    model = Own()
    model.compile("sgd", loss)
    found = cost(model, batch((6,)))
    assert [(layer.path, layer.forward_flops) for layer in found.layers] == [
        ("wide", 2 * BATCH * 6 * 4),
        ("last", 0),
    ]
    assert suggest(model, batch((6,))).without == ("last",)


@pytest.mark.usefixtures("quick")
def test_a_model_that_runs_eagerly_is_said_to(compiled, batch):
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), run_eagerly=True)
    with pytest.warns(UserWarning, match="runs eagerly, while its layers are timed in graphs"):
        cost(model, batch((4,)))


@pytest.mark.usefixtures("quick")
def test_bad_models_are_refused(compiled, batch):
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        cost("model", batch((4,)))
    with pytest.raises(ValueError, match="not compiled"):
        cost(keras.Sequential([keras.Input((4,)), layers.Dense(2)]), batch((4,)))

    class Bare(keras.Model):
        def call(self, inputs):
            return inputs * 2

    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = keras.Sequential([keras.Input((4,)), layers.Dense(1)])

        def train_step(self, data):
            return {"loss": ops.mean(self.net(data[0]))}

    with pytest.raises(UnsupportedError, match="whose train_step calls its parts"):
        cost(compiled(Pair()), batch((4,)))
    with pytest.raises(ValueError, match="which calls none"):
        cost(compiled(Bare()), batch((4,)))


@pytest.mark.usefixtures("quick")
def test_batches_on_which_a_model_does_not_train_are_refused(compiled, batch, monkeypatch):
    with pytest.raises(PipelineError, match="at least one example"):
        cost(compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2)])), (tf.zeros((0, 4)), tf.zeros((0, 2))))
    monkeypatch.setattr(costing, "StepTimer", StepTimer)
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2)]))
    for wrong in (batch((5,)), (np.float32(0), tf.zeros(3))):
        with pytest.raises(
            UnsupportedError, match=r"Expected a batch that .* trains on\. Found: .* make model.fit run on"
        ):
            cost(model, wrong)

    class Four(keras.Sequential):
        def train_step(self, data):
            return {"loss": ops.mean(self(data[0]))}

    model = compiled(Four([keras.Input((4,)), layers.Dense(2)]))
    with pytest.raises(UnsupportedError, match=r"of a batch \(x, y\[, sample_weight\]\).* compile what its train_step"):
        cost(model, tf.data.Dataset.from_tensors((tf.zeros((3, 4)), *tf.zeros((3, 3)))))


@pytest.mark.parametrize("refusing", [cost, suggest, lambda model, data: distil(model, model, data), prune, quantize])
def test_several_replicas_are_refused(compiled, batch, monkeypatch, refusing):
    model = compiled(keras.Sequential([keras.Input((4,)), layers.Dense(2, name="only")]))
    strategy = SimpleNamespace(num_replicas_in_sync=2)
    monkeypatch.setattr(keras.Sequential, "distribute_strategy", property(lambda self: strategy), raising=False)
    with pytest.raises(UnsupportedError, match=r"one device.* trains on 2 replicas.* outside the strategy's scope"):
        refusing(model, batch((4,)))


@pytest.mark.usefixtures("quick")
def test_products_in_float64_are_set_against_their_own_rate(compiled):
    model = compiled(keras.Sequential([keras.Input((8,), dtype="float64"), layers.Dense(4, dtype="float64")]))
    found = cost(model, (tf.zeros((3, 8), "float64"), tf.zeros(3)))
    (dense,) = found.layers
    assert set(found.matmul_tflops) == {"float64"}
    flops = 2 * (2 * 3 * 8 * 4)  # forward, and for the gradient of the weights
    assert dense.least_products_ms == pytest.approx(flops / found.matmul_tflops["float64"] / 1e9)
