import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import WithoutCall

from tfopt.precision import alignment

layers = keras.layers


@pytest.fixture(autouse=True)
def _names_count_from_one():
    keras.utils.clear_session()


def net(*stack, shape, policy="mixed_float16", **options):
    keras.config.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input(shape, **options)], name="net")
    for make in stack:
        model.add(make())
    return model


def misses(report):
    return {(miss.layers[0].split("/")[-1], miss.dimension): (miss.size, miss.next_size) for miss in report.misses}


@pytest.mark.parametrize(
    ("policy", "multiple", "best"),
    [("mixed_float16", 8, 64), ("mixed_bfloat16", 8, 64), ("float32", 4, 32), ("bfloat16", 8, 64)],
)
def test_multiples_follow_the_compute_dtype(policy, multiple, best):
    model = net(lambda: layers.Dense(best + 1, name="wide"), shape=(best,), policy=policy)
    (miss,) = alignment(model, batch_size=best).misses
    assert (miss.layers, miss.dimension, miss.size, miss.multiple) == (("net/wide",), "outputs", best + 1, multiple)
    assert (miss.next_size, miss.best_size) == (best + multiple, 2 * best)
    assert miss.padding_percent == pytest.approx(100 * (multiple - 1) / (best + 1))
    assert miss.share_percent == 100


def test_multiples_of_16_bytes_pass_and_those_that_are_not_of_128_are_counted():
    report = alignment(net(lambda: layers.Dense(72), shape=(64,)), batch_size=40)
    assert report.misses == ()
    assert report.below_best == 2  # 72 outputs, a batch of 40
    assert "no size misses" in str(report)


def test_float8_layers_need_multiples_of_16():
    model = net(lambda: layers.Dense(24), shape=(16,), policy="mixed_bfloat16")
    assert alignment(model, 16).misses == ()
    model.layers[0].quantize("float8")
    (miss,) = alignment(model, 16).misses
    assert (miss.dtype, miss.multiple, miss.next_size, miss.best_size) == ("float8", 16, 32, 128)


def test_policies_of_single_layers():
    keras.config.set_dtype_policy("mixed_float16")
    model = net(lambda: layers.Dense(12, name="half"), lambda: layers.Dense(12, dtype="float32"), shape=(8,))
    assert misses(alignment(model, 8)) == {("half", "outputs"): (12, 16)}


def test_batch_and_positions_make_the_rows():
    model = net(lambda: layers.Dense(8, name="a"), shape=(50, 8))
    assert alignment(model, 4).misses == ()  # 200 rows
    (miss,) = alignment(model, 11).misses
    assert (miss.dimension, miss.size, miss.next_size) == ("batch × positions", 550, 600)
    assert miss.note == "batch size 12"
    assert miss.padding_percent == pytest.approx(100 * (12 / 11 - 1))


def test_alike_layers_miss_once_and_the_worst_stands_first():
    stack = [lambda: layers.Dense(60), lambda: layers.Dense(60), lambda: layers.Dense(10)]
    report = alignment(net(*stack, shape=(600,)), batch_size=8)
    shares = [miss.share_percent for miss in report.misses]
    assert shares == sorted(shares, reverse=True)
    total = 600 * 60 + 60 * 60 + 60 * 10
    assert report.multiply_adds == 8 * total
    outputs, inputs, classes = report.misses
    assert [len(miss.layers) for miss in report.misses] == [2, 2, 1]
    assert (outputs.dimension, inputs.dimension, classes.size) == ("outputs", "inputs", 10)
    assert outputs.share_percent == pytest.approx(100 * (600 * 60 + 60 * 60) / total)
    assert classes.share_percent == pytest.approx(100 * 600 / total)


def test_convolutions():
    stack = [
        lambda: layers.Conv2D(6, 3, strides=2, name="first"),
        lambda: layers.Conv2D(12, 3, groups=3, padding="same", name="grouped"),
        lambda: layers.SeparableConv2D(20, 3, depth_multiplier=2, name="separable"),
        lambda: layers.Conv2DTranspose(4, 3, strides=2, name="up"),
    ]
    report = alignment(net(*stack, shape=(17, 17, 3)), batch_size=8)
    assert misses(report) == {
        ("first", "input channels"): (3, 8),
        ("first", "output channels"): (6, 8),
        ("grouped", "input channels a group"): (2, 8),
        ("grouped", "output channels a group"): (4, 8),
        ("separable", "output channels"): (20, 24),
        ("up", "input channels"): (20, 24),
        ("up", "output channels"): (4, 8),
    }
    separable = 36 * (9 * 24 + 24 * 20)
    assert report.multiply_adds == 8 * (64 * 9 * 3 * 6 + 64 * 9 * 3 * 2 * 4 + separable + 36 * 9 * 20 * 4)
    image = next(miss for miss in report.misses if miss.size == 3)
    assert "cheap to leave" in image.note
    grown = next(miss for miss in report.misses if miss.size == 20 and miss.dimension == "output channels")
    assert grown.padding_percent == pytest.approx(100 * 36 * 24 * 4 / separable)


def test_channels_first_and_one_and_three_dimensions():
    first = net(lambda: layers.Conv2D(12, 3, data_format="channels_first"), shape=(8, 5, 7))
    report = alignment(first, 2)
    assert misses(report) == {("conv2d", "output channels"): (12, 16)}
    assert report.multiply_adds == 2 * 3 * 5 * 9 * 8 * 12
    assert alignment(net(lambda: layers.Conv1D(8, 3), shape=(10, 8)), 2).multiply_adds == 2 * 8 * 3 * 8 * 8
    assert alignment(net(lambda: layers.Conv3D(8, 2), shape=(4, 4, 4, 8)), 2).multiply_adds == 2 * 27 * 8 * 8 * 8


def test_the_multiply_adds_of_a_known_network():
    """3.86 billion for an image: Keras' ResNet-50 strides in the first convolution of a block, as the paper's does."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    report = alignment(keras.applications.ResNet50(weights=None), batch_size=256)
    assert report.multiply_adds / 256 / 1e9 == pytest.approx(3.86, abs=0.01)
    assert [(miss.layers, miss.size) for miss in report.misses] == [(("conv1_conv",), 3)]


@pytest.mark.parametrize(
    "make",
    [lambda: layers.DepthwiseConv2D(3), lambda: layers.Conv2D(8, 3, groups=8), lambda: layers.DepthwiseConv1D(3)],
)
def test_depthwise_convolutions_use_no_tensor_cores(make):
    shape = (9, 8) if isinstance(make(), layers.DepthwiseConv1D) else (9, 9, 8)
    report = alignment(net(make, layers.Flatten, lambda: layers.Dense(8), shape=shape), batch_size=8)
    (remark,) = report.without_tensor_cores
    assert "alone" in remark.reason
    assert remark.layers[0].split("/")[-1].startswith(("depthwise_conv", "conv2d"))
    assert "No Tensor Cores: each channel" in str(report)


def test_attention_and_its_projections():
    keras.config.set_dtype_policy("mixed_float16")
    inputs = keras.Input((10, 64))
    outputs = layers.MultiHeadAttention(3, 20, name="mha")(query=inputs, value=inputs)
    model = keras.Model(inputs, outputs)
    report = alignment(model, batch_size=8)
    assert misses(report) == {
        ("mha", "query length"): (10, 16),
        ("mha", "key length"): (10, 16),
        ("mha", "head size"): (20, 24),
        ("query", "outputs (3 × 20)"): (60, 72),
        ("attention_output", "inputs (3 × 20)"): (60, 72),
    }
    projections = next(miss for miss in report.misses if "outputs" in miss.dimension)
    assert sorted(path.split("/")[-1] for path in projections.layers) == ["key", "query", "value"]
    assert report.multiply_adds == 8 * (4 * 10 * 64 * 60 + 2 * 3 * 10 * 10 * 20)


def test_cross_and_grouped_attention_take_each_length_from_its_own_input():
    keras.config.set_dtype_policy("mixed_float16")
    queries, values = keras.Input((12, 32)), keras.Input((8, 32))
    for layer in (layers.MultiHeadAttention(4, 8), layers.GroupQueryAttention(8, 4, 2)):
        # By name and out of order: the graph alone would not say which is which.
        model = keras.Model([queries, values], layer(value=values, query=queries, key=values))
        report = alignment(model, batch_size=8)
        assert {miss.dimension: miss.size for miss in report.misses if "length" in miss.dimension} == {
            "query length": 12
        }
        assert report.unknown == ()
    # The last one: four heads for queries, two for keys and values.
    projections = 2 * 12 * 32 * (4 * 8) + 2 * 8 * 32 * (2 * 8)
    assert report.multiply_adds == 8 * (projections + 2 * 4 * 12 * 8 * 8)
    dotted = keras.Model([queries, values], layers.Attention()([queries, values]))
    assert alignment(dotted, 8).multiply_adds == 8 * 2 * 12 * 8 * 32


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3), ("SimpleRNN", 1)])
def test_recurrent_layers_run_their_cell_at_each_step(kind, gates):
    make = lambda: layers.Bidirectional(getattr(layers, kind)(12))  # noqa: E731
    report = alignment(net(make, shape=(7, 8)), batch_size=5)
    assert {(miss.dimension, miss.size, miss.next_size) for miss in report.misses} == {
        ("units", 12, 16),
        ("batch", 5, 8),
    }
    assert report.multiply_adds == 2 * 7 * 5 * gates * (8 * 12 + 12 * 12)
    units = next(miss for miss in report.misses if miss.dimension == "units")
    assert units.padding_percent == pytest.approx(100 * ((8 * 16 + 16 * 16) / (8 * 12 + 12 * 12) - 1))


def test_time_distributed_and_nested_and_shared_layers():
    keras.config.set_dtype_policy("mixed_float16")
    shared = layers.Dense(12, name="shared")
    inner = keras.Sequential([keras.Input((12,)), layers.Dense(12, name="inner")])
    inputs = keras.Input((12,))
    model = keras.Model(inputs, inner(shared(shared(inputs))))
    assert alignment(model, 8).multiply_adds == 3 * 8 * 12 * 12
    model = net(lambda: layers.TimeDistributed(layers.Dense(4)), shape=(5, 8))
    assert alignment(model, 8).multiply_adds == 5 * 8 * 8 * 4


def test_einsum_layers():
    model = net(lambda: layers.EinsumDense("abc,cde->abde", output_shape=(None, 3, 4)), shape=(6, 10))
    assert misses(alignment(model, 4)) == {
        ("einsum_dense", "inputs"): (10, 16),
        ("einsum_dense", "outputs (3 × 4)"): (12, 24),
    }
    model = net(lambda: layers.EinsumDense("...x,xy->...y", output_shape=12, name="dots"), shape=(6, 8))
    report = alignment(model, 4)
    assert (misses(report), report.multiply_adds) == ({("dots", "outputs"): (12, 16)}, 24 * 8 * 12)
    experts = net(lambda: layers.EinsumDense("bed,edh->beh", output_shape=(3, 8)), shape=(3, 16))
    assert alignment(experts, 8).multiply_adds == 8 * 3 * 16 * 8


def tokens(vocabulary, reversible=False, length=8):
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((length,), dtype="int32")
    options = {"reverse_dtype": "bfloat16"} if reversible else {}
    embedding = (layers.ReversibleEmbedding if reversible else layers.Embedding)(
        vocabulary, 16, name="tokens", **options
    )
    hidden = layers.Dense(16)(embedding(inputs))
    head = embedding(hidden, reverse=True) if reversible else layers.Dense(vocabulary, name="head")(hidden)
    return keras.Model(inputs, head)


@pytest.mark.parametrize("reversible", [False, True])
def test_a_vocabulary_that_pads(reversible):
    report = alignment(tokens(50257, reversible), batch_size=8)
    (miss,) = report.misses
    assert (miss.size, miss.next_size, miss.best_size) == (50257, 50264, 50304)
    assert "vocabulary, also of tokens" in miss.note
    assert report.multiply_adds == 64 * (16 * 16 + 16 * 50257)


@pytest.mark.parametrize("dtype", ["float32", None])  # None: Keras does not cast embeddings
def test_a_vocabulary_head_in_float32(dtype):
    keras.config.set_dtype_policy("mixed_bfloat16")
    inputs = keras.Input((8,), dtype="int32")
    embedding = layers.ReversibleEmbedding(1001, 16, reverse_dtype=dtype)
    (miss,) = alignment(keras.Model(inputs, embedding(embedding(inputs), reverse=True)), batch_size=8).misses
    assert (miss.dtype, miss.multiple, miss.next_size) == ("float32", 4, 1004)


def test_what_is_unknown_is_said_to_be():
    report = alignment(tokens(1001, length=None), batch_size=3)
    assert report.multiply_adds == 0
    (miss,) = report.misses
    assert (miss.size, miss.share_percent) == (1001, None)
    assert miss.padding_percent == pytest.approx(100 * 7 / 1001)
    (remark,) = report.unknown
    assert remark.layers == ("dense", "head")
    assert "unknown" in str(report)


def test_one_unknown_size_makes_every_share_unknown():
    stack = [lambda: layers.Conv2D(12, 3), layers.GlobalAveragePooling2D, lambda: layers.Dense(10)]
    report = alignment(net(*stack, shape=(None, None, 8)), batch_size=8)
    assert [(miss.dimension, miss.share_percent) for miss in report.misses] == [
        ("output channels", None),  # first, since it has more multiply-adds at a single position already
        ("inputs", None),
        ("outputs", None),
    ]


def test_a_cell_with_an_unknown_number_of_steps():
    report = alignment(net(lambda: layers.LSTM(12), shape=(None, 8)), batch_size=8)
    assert [miss.share_percent for miss in report.misses] == [None]
    assert report.unknown[0].layers == ("net/lstm/lstm_cell",)


class Own(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 12))

    def call(self, inputs):
        return inputs @ self.kernel


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="own")
        self.inner = layers.Dense(12)
        self.after = Own(name="after")

    def call(self, inputs):
        return self.after(self.inner(inputs))


def test_subclassed_models_and_layers_of_ones_own():
    keras.config.set_dtype_policy("mixed_float16")
    model = Subclassed()
    with pytest.raises(ValueError, match=r"Expected a built model\. Received: 'own'.*Call model\.build"):
        alignment(model, 8)
    model(np.zeros((3, 20), "float32"))
    report = alignment(model, batch_size=6)
    assert misses(report) == {
        ("dense", "inputs"): (20, 24),
        ("dense", "outputs"): (12, 16),
        ("dense", "batch"): (6, 8),
    }
    assert report.unknown[0].layers == ("own/after",)
    assert "its own" in report.unknown[0].reason


def test_each_network_of_a_model_without_a_call():
    keras.config.set_dtype_policy("mixed_float16")
    report = alignment(WithoutCall(), batch_size=8)
    networks = {path.split("/")[0] for miss in report.misses for path in miss.layers}
    assert networks == {"encoder", "decoder"}
    assert report.multiply_adds == 2 * 8 * (6 * 7 + 4 * 7 * 7 + 7 * 6)
    with pytest.raises(ValueError, match=r"Expected a built model\. Received: 'pair'"):
        alignment(WithoutCall(built=False), 8)


def test_without_tensor_cores():
    model = net(lambda: layers.Dense(13), shape=(7,), policy="float64")
    report = alignment(model, 3)
    assert report.misses == ()
    assert "float64" in report.without_tensor_cores[0].reason
    model = net(lambda: layers.Dense(13), shape=(8,), policy="float32")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        report = alignment(model, 4)
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)
    assert (report.misses, report.below_best) == ((), 0)
    assert "TF32 switched off" in str(report)
    assert len(alignment(model, 4).misses) == 1


def test_nothing_changes_and_it_is_json():
    model = net(lambda: layers.Dense(13, name="wide"), layers.BatchNormalization, shape=(7,))
    before = model.get_weights()
    report = alignment(model, 3)
    assert all(map(np.array_equal, before, model.get_weights()))
    values = json.loads(json.dumps(report.to_dict()))
    assert values["misses"][0]["layers"] == ["net/wide"]
    assert (values["model"], values["batch_size"]) == ("net", 3)
    lines = str(report).splitlines()
    assert lines[0] == "Alignment of net at batch size 3: sizes that miss Tensor Core multiples"
    assert lines[2].split() == ["net/wide", "batch", "8", "(float16)", "3", "8", "+167", "%", "100", "%", "64"]


def test_bad_arguments():
    model = net(lambda: layers.Dense(8), shape=(8,))
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        alignment(layers.Dense(8), 8)
    for batch_size in (True, 8.0, "8", None):
        with pytest.raises(TypeError, match=r"Expected batch_size to be an integer\. Received"):
            alignment(model, batch_size)
    for batch_size in (0, -8):
        with pytest.raises(ValueError, match="Expected batch_size to be at least 1"):
            alignment(model, batch_size)
    with pytest.raises(ValueError, match=r"Expected a built model.*first"):
        alignment(keras.Sequential([layers.Dense(8)]), 8)
    with pytest.raises(ValueError, match=r"Expected a model with dense.*multiply no matrices.*leave"):
        alignment(net(layers.Flatten, layers.BatchNormalization, shape=(8, 8)), 8)


@pytest.mark.parametrize("kind", [layers.MultiHeadAttention, layers.GroupQueryAttention])
def test_a_shared_attention_layer_counts_with_the_lengths_of_each_call(kind):
    query, value = keras.Input((10, 32)), keras.Input((20, 32))
    options = (4, 8) if kind is layers.MultiHeadAttention else (8, 4, 4)
    attention = kind(*options)
    outputs = layers.Concatenate(axis=1)([attention(query, query), attention(query, value)])
    found = alignment(keras.Model([query, value], outputs), batch_size=2).multiply_adds
    one, other = 10, 20
    assert found == sum(2 * (2 * one * 32 * 32 + 2 * keys * 32 * 32 + 2 * 4 * one * keys * 8) for keys in (one, other))


def test_an_einsum_without_a_matrix_product_is_not_judged():
    def scaling(*more):
        return keras.Sequential([keras.Input((12,)), layers.EinsumDense("ab,b->ab", 12, name="scale"), *more])

    report = alignment(scaling(layers.Dense(10, name="head")), batch_size=8)
    assert misses(report) == {("head", "outputs"): (10, 12)}
    assert "scale" not in str(report)
    with pytest.raises(ValueError, match="whose layers multiply no matrices"):
        alignment(scaling(), batch_size=8)


def test_a_model_of_an_input_alone():
    with pytest.raises(ValueError, match=r"Expected a model with layers\. Received: .*, which has none\. Add them"):
        alignment(keras.Sequential([keras.Input((8,))]), batch_size=8)
