import keras
import pytest

from tfopt.bench.workloads import gpt2
from tfopt.model.flops import model_flops

layers = keras.layers


def flops(*stack, shape=(4,), model=keras.Sequential):
    return model_flops(model([keras.Input(shape), *stack]))


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


def test_resnet50():
    found = model_flops(keras.applications.ResNet50(weights=None))
    assert resnet50_multiply_adds() == 3_857_973_248
    assert found.per_example == 2 * 3 * 3_857_973_248
    assert found.unknown == ()


@pytest.mark.slow
def test_gpt2():
    blocks, width, length, vocabulary = 12, 768, 1024, 50304
    keras.config.set_dtype_policy("mixed_bfloat16")
    found = model_flops(gpt2.model())
    # A multiply-add for each weight of the blocks and the head and each token, and attention: queries by keys, and
    # scores by values, for each pair of tokens.
    weights = blocks * (4 * width**2 + 2 * width * 4 * width) + width * vocabulary
    assert found.per_example == 6 * (weights * length + blocks * 2 * length**2 * width)
    assert found.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("stack", "shape", "forward"),
    [
        ([layers.Dense(5)], (4,), 4 * 5),
        ([layers.Dense(5, activation="relu"), layers.Dropout(0.5), layers.Dense(2)], (4,), 4 * 5 + 5 * 2),
        ([layers.Dense(5)], (7, 4), 7 * 4 * 5),
        ([layers.EinsumDense("abc,cd->abd", (None, 5))], (7, 4), 7 * 4 * 5),
        ([layers.Conv2D(6, 3, padding="same", strides=2), layers.BatchNormalization()], (8, 8, 3), 16 * 9 * 3 * 6),
        ([layers.Conv2D(6, 3, groups=3)], (8, 8, 3), 36 * 9 * 6),
        ([layers.DepthwiseConv2D(3)], (8, 8, 3), 36 * 9 * 3),
        ([layers.Conv1D(6, 2)], (8, 3), 7 * 2 * 3 * 6),
        ([layers.Conv2DTranspose(6, 3)], (8, 8, 3), 64 * 9 * 3 * 6),
        ([layers.Embedding(100, 8), layers.Flatten(), layers.Dense(2)], (6,), 6 * 8 * 2),
        ([layers.LSTM(5)], (7, 4), 7 * 4 * (4 * 5 + 5 * 5)),
        ([layers.GRU(5)], (7, 4), 7 * 3 * (4 * 5 + 5 * 5)),
        ([layers.Bidirectional(layers.SimpleRNN(5))], (7, 4), 2 * 7 * (4 * 5 + 5 * 5)),
        ([layers.TimeDistributed(layers.Dense(5))], (7, 4), 7 * 4 * 5),
        ([keras.Sequential([layers.Dense(5)]), layers.LayerNormalization()], (4,), 4 * 5),
    ],
)
def test_by_hand(stack, shape, forward):
    assert flops(*stack, shape=shape).per_example == 2 * 3 * forward


def test_attention_between_sequences():
    queries, values = keras.Input((6, 8)), keras.Input((10, 8))
    output = layers.MultiHeadAttention(2, 3, value_dim=5)(queries, values)
    projections = 6 * 8 * 2 * 3 + 10 * 8 * 2 * 3 + 10 * 8 * 2 * 5 + 6 * 2 * 5 * 8
    products = 2 * 6 * 10 * (3 + 5)
    assert model_flops(keras.Model([queries, values], output)).per_example == 6 * (projections + products)


def test_a_shared_layer_counts_at_each_call():
    dense, inputs = layers.Dense(4), keras.Input((4,))
    assert model_flops(keras.Model(inputs, dense(dense(inputs)))).per_example == 6 * 2 * 16


def test_frozen_layers_have_less_of_a_backward_pass_or_none():
    def net(*trainable):
        stack = [layers.Dense(4, trainable=each) for each in trainable]
        return flops(*stack).per_example / (2 * 16)

    assert net(True, True, True) == 9
    assert net(False, False, True) == 1 + 1 + 3
    assert net(True, False, True) == 3 + 2 + 3
    frozen = keras.Sequential([keras.Input((4,)), keras.Sequential([layers.Dense(4)]), layers.Dense(4)])
    frozen.layers[0].trainable = False
    assert model_flops(frozen).per_example == 2 * 16 * (1 + 3)


def test_attention_that_trains_in_no_part_has_no_backward_pass():
    inputs = keras.Input((6, 8))
    attention = layers.MultiHeadAttention(2, 3)
    model = keras.Model(inputs, layers.Dense(1)(attention(inputs, inputs)))
    whole, head = model_flops(model).per_example, 6 * 6 * 8
    attention.trainable = False
    assert model_flops(model).per_example == (whole - head) / 3 + head


def test_the_dtype_that_most_run_in():
    found = flops(layers.Dense(50, dtype="mixed_bfloat16"), layers.Dense(2, dtype="float32"))
    assert found.by_dtype == {"bfloat16": 6 * 4 * 50, "float32": 6 * 50 * 2}
    assert found.dtype == "bfloat16"


class Scale(layers.Layer):
    """A table of weights, and no product."""

    def build(self, shape):
        self.table = self.add_weight(shape=shape[1:])

    def call(self, inputs):
        return inputs * self.table


class Gate(layers.Layer):
    """A layer inside, and maybe a product of its own."""

    def __init__(self, product=False):
        super().__init__()
        self.dense, self.product = layers.Dense(4), product

    def call(self, inputs):
        inner = self.dense(inputs)
        return keras.ops.matmul(inner, keras.ops.transpose(inner, (0, 2, 1))) if self.product else inner


class Whole(keras.Model):
    """A subclassed model that calls one layer so often."""

    def __init__(self, times=1):
        super().__init__(name="whole")
        self.dense, self.times = layers.Dense(4), times

    def call(self, inputs):
        for _ in range(self.times):
            inputs = self.dense(inputs)
        return inputs


def called(model):
    model(keras.ops.zeros((1, 4)))
    return model


def test_layers_of_ones_own_are_known_by_their_graph():
    assert flops(Scale(), layers.Dense(4), shape=(7, 4)).per_example == 6 * 7 * 16
    assert flops(Gate(), shape=(7, 4)).per_example == 6 * 7 * 16
    assert model_flops(called(Whole())).per_example == 6 * 16


def unknown(layer, shape):
    inputs = keras.Input(shape)
    found = model_flops(keras.Model(inputs, layer(inputs)))
    assert found.per_example is None
    return found.unknown


def test_what_is_not_known_is_named():
    gate, dense = Gate(product=True), layers.Dense(4)
    assert unknown(gate, (7, 4)) == (f"{gate.path} (products in its own call)",)
    assert unknown(dense, (None, 4)) == (f"{dense.path} (a length or size of its input is None)",)
    dense.enable_lora(2)
    assert unknown(dense, (4,)) == (f"{dense.path} (LoRA)",)
    assert "ConvLSTM" in unknown(layers.ConvLSTM1D(2, 3), (3, 8, 2))[0]
    assert model_flops(called(Whole(times=2))).unknown == ("whole (products in its own call)",)


def test_a_product_between_layers_is_not_known():
    inputs = keras.Input((7, 4))
    product = keras.ops.matmul(layers.Dense(4)(inputs), keras.ops.transpose(inputs, (0, 2, 1)))
    found = model_flops(keras.Model(inputs, product))
    assert found.per_example is None
    assert "keras.ops: matmul" in found.unknown[0]


def test_a_train_step_of_ones_own_is_not_known():
    class Custom(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    found = flops(layers.Dense(2), model=Custom)
    assert found.per_example is None
    assert "a train_step of its own" in found.unknown[0]


def test_counting_leaves_the_model_as_it_was():
    class Noise(layers.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = layers.Dropout(0.5)

        def call(self, inputs):
            self.add_loss(keras.ops.sum(inputs))
            return self.dropout(inputs, training=True)

    model = keras.Sequential([keras.Input((4,)), Noise(), layers.Dense(2)])
    before = [variable.numpy().tolist() for variable in model.variables]
    losses = len(model.losses)
    assert model_flops(model).per_example == 6 * 8
    assert [variable.numpy().tolist() for variable in model.variables] == before
    assert len(model.losses) == losses


def test_a_model_without_products_has_no_operations():
    assert flops(layers.Flatten()).per_example is None


def test_the_products_in_a_lambda_are_not_known():
    product = layers.Lambda(lambda inputs: keras.ops.matmul(inputs, keras.ops.ones((4, 4))))
    found = flops(layers.Dense(4), product)
    assert (found.per_example, found.unknown) == (None, (f"{product.path} (products in its own call)",))
    assert flops(layers.Dense(4), layers.Lambda(lambda inputs: inputs / 2)).per_example == 6 * 16
