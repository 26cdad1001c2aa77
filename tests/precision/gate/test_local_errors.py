"""What one layer, or what lies between layers, computes wrongly in 16 bits is named, however small a part it is."""

import keras
import numpy as np
import pytest
from precision_nets import cross_entropy
from quick import first_quick

from tfopt.precision import apply, check

layers, ops = keras.layers, keras.ops
BF16 = "mixed_bfloat16"
LENGTH = 1024
_random = np.random.default_rng(0)
SEQUENCES = _random.normal(size=(8, LENGTH, 8)).astype("float32")
LABELS = np.arange(8) % 3


def net(data, body, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(data.shape[1:], **options)
    model = keras.Model(inputs, layers.Dense(3, name="head")(body(inputs)), name="net")
    model.compile("adam", cross_entropy())
    return model


class Positions(layers.Layer):
    """Adds sines of the positions; `dtype` is what these are computed in, by default that of the layer."""

    def __init__(self, dtype_of_positions=None, **options):
        super().__init__(**options)
        self.own = dtype_of_positions

    def call(self, x):
        places = ops.cast(ops.arange(ops.shape(x)[1]), self.own or x.dtype)[:, None]
        rates = ops.cast(10.0 ** -ops.arange(8.0), self.own or x.dtype)
        return x + ops.cast(ops.sin(places * rates), x.dtype)


class Rotary(layers.Layer):
    def call(self, x):
        angles = ops.cast(ops.arange(ops.shape(x)[1]), x.dtype)[:, None] * ops.cast(0.5 ** ops.arange(4.0), x.dtype)
        a, b = ops.split(x, 2, axis=-1)
        turned = (a * ops.cos(angles) - b * ops.sin(angles), a * ops.sin(angles) + b * ops.cos(angles))
        return ops.concatenate(turned, axis=-1)


class Average(layers.Layer):
    """Divides by a moving average of what goes through, kept in float32 but computed in the layer's dtype."""

    def __init__(self, autocast=True, **options):
        super().__init__(**options)
        self.keeps = autocast

    def build(self, shape):
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size", autocast=self.keeps)

    def call(self, x):
        now = ops.cast(ops.mean(ops.abs(x)), self.compute_dtype if self.keeps else "float32")
        self.size.assign(0.999 * self.size + 0.001 * now)
        return x / ops.cast(self.size, x.dtype)


def pooled(layer):
    return lambda x: layers.GlobalAveragePooling1D()(layer(layers.Dense(8, name="first")(x)))


@pytest.mark.slow
@pytest.mark.parametrize("layer", first_quick([Positions, Rotary]))
def test_positions_of_16_bits_are_named(layer):
    model = net(SEQUENCES, pooled(layer(name="positions")))
    report = check(model, (SEQUENCES, LABELS), BF16)
    assert report.loss_drift < 0.02  # which tells nothing
    assert [problem.startswith("The output of 'positions' differs from float32 by") for problem in report.problems] == [
        True
    ]
    assert report.fallback == {"net": BF16, "positions": "float32"}


@pytest.mark.slow
def test_positions_of_float32_pass():
    model = net(SEQUENCES, pooled(Positions("float32")))
    assert check(model, (SEQUENCES, LABELS), BF16).passed


class Between(keras.Model):
    """Computes positions in its own call, between its layers."""

    def __init__(self):
        super().__init__(name="net")
        self.first, self.pool = layers.Dense(8, name="first"), layers.GlobalAveragePooling1D(name="pool")
        self.body, self.head = layers.Dense(8, name="body"), layers.Dense(3, name="head")

    def call(self, x):
        x = self.first(x)
        places = ops.cast(ops.arange(LENGTH), x.dtype)[:, None] * ops.cast(0.5 ** ops.arange(8.0), x.dtype)
        return self.head(self.body(self.pool(x + ops.sin(places))))


@pytest.mark.slow
def test_what_is_computed_between_layers_is_named():
    model = Between()
    model.compile("adam", cross_entropy())
    report = check(model, (SEQUENCES, LABELS), BF16)
    assert report.problems[0].startswith("What 'net' computes between its layers differs from float32 by")
    assert check(model, (SEQUENCES, LABELS), report.fallback).passed


@pytest.mark.slow
def test_a_moving_average_of_16_bits_is_named():
    for keeps, passes in ((True, False), (False, True)):
        model = net(SEQUENCES[:, :4], pooled(Average(keeps, name="average")))
        report = check(model, (SEQUENCES[:, :4], LABELS), BF16)
        assert report.passed == passes, str(report)
        assert passes or report.problems[0].startswith(
            "'average' updates its variable 'size' in bfloat16: what this step"
        )


def years(count=3):
    rows = _random.normal(size=(64, count)).astype("float32")
    rows[:, 1] = _random.integers(1990, 2027, size=64)
    return rows, np.arange(64) % 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [lambda: layers.Rescaling(1 / 2026, name="first"), lambda: layers.BatchNormalization(name="first")],
    ids=["Rescaling", "BatchNormalization"],
)
def test_a_year_is_hidden_by_bfloat16(first):
    x, y = years()
    model = net(x, lambda inputs: layers.Dense(8)(first()(inputs)))
    report = check(model, (x, y), BF16)
    assert "'first' rounds the batch to bfloat16, which hides feature 1: it reaches 2026" in report.problems[0]
    assert check(model, (x, y), "mixed_float16").passed  # whole numbers up to 2048
    report = check(model, ((x - x.mean(0)) / x.std(0), y), BF16)
    assert report.passed, report.problems


@pytest.mark.slow
def test_a_year_in_a_normalization_made_in_16_bits():
    """Its constants have the dtype it was built in, also in the reference of old."""
    x, y = years()
    keras.config.set_dtype_policy(BF16)
    normalization = layers.Normalization(mean=x.mean(0), variance=x.var(0), name="normalization")
    model = net(x, lambda inputs: layers.Dense(8)(normalization(inputs)))
    keras.config.set_dtype_policy("float32")
    constants = normalization.mean
    report = check(model, (x, y), BF16)
    assert "'normalization'" in report.problems[0]
    assert normalization.mean is constants
    apply(model, BF16)
    assert normalization.compute_dtype == "float32"
    np.testing.assert_allclose(normalization(x), (x - x.mean(0)) / x.std(0), rtol=1e-3, atol=1e-3)
    report = check(model, (x, y), BF16)
    assert report.passed, report.problems


@pytest.mark.slow
def test_ids_that_a_layer_before_rounds():
    """V = 2,500 in float16: 45 in 1,000 ids are odd numbers beyond 2048, and become even."""
    ids = _random.integers(2500, size=(64, 10))
    wrong = np.mean(ids.astype("float16").astype("int64") != ids)
    model = net(
        ids, lambda x: layers.Flatten()(layers.Embedding(2500, 4, name="ids")(layers.Reshape((10,), name="cast")(x)))
    )
    report = check(model, (ids.astype("float32"), np.arange(64) % 3), "mixed_float16")
    assert 0.02 < wrong < 0.2
    assert report.problems[0].startswith(
        f"'ids' gets ids rounded to float16: {100 * wrong:.3g} % of them turn into other ids"
    )
    assert check(model, (ids.astype("float32") % 2000, np.arange(64) % 3), "mixed_float16").passed


def test_features_that_only_seem_hidden():
    """Constant features, one-hot ones, and a bright background of images, which hardly varies."""
    x = _random.normal(size=(64, 6)).astype("float32")
    x[:, 0], x[:, 1] = 2026.0, _random.integers(2, size=64)
    x[:, 2] = 0.98 + 0.004 * _random.random(64)
    model = net(x, lambda inputs: layers.Dense(8, name="first")(inputs))
    assert check(model, (x, np.arange(64) % 3), BF16).passed


@pytest.mark.slow
def test_a_feature_of_small_spread_before_batch_normalization():
    """Latitudes of one city, in degrees: batch normalisation scales them up to the size of the other features."""
    x = _random.normal(size=(64, 32)).astype("float32")
    x[:, 1] = 40.7 + 0.02 * _random.normal(size=64)
    model = net(x, lambda inputs: layers.Dense(8)(layers.BatchNormalization(name="first")(inputs)))
    report = check(model, (x, np.arange(64) % 3), BF16)
    assert "'first' rounds the batch to bfloat16, which hides feature 1: it reaches 40.7" in report.problems[0]
    x[:, 1] -= 40.7
    assert check(model, (x, np.arange(64) % 3), BF16).passed


@pytest.mark.slow
def test_a_step_of_a_sequence_is_not_rounded_again():
    """A random walk spreads little at its first step, which an RNN computes outside of its loop."""
    walk = np.cumsum(np.random.default_rng(0).normal(size=(32, 60, 7)), axis=1)
    x = (1000 + 10 * walk).astype("float32")
    keras.config.set_dtype_policy(BF16)
    normalization = layers.Normalization(mean=x.mean((0, 1)), variance=x.var((0, 1)))
    rnn = layers.SimpleRNN(8)
    keras.config.set_dtype_policy("float32")
    model = net(x, lambda inputs: rnn(normalization(inputs)))
    report = check(model, (x, np.arange(32) % 3), {})
    assert report.passed, report.problems


@pytest.mark.slow
def test_ids_are_not_blamed_on_the_input_of_another_model():
    ids = _random.integers(5000, size=(16, 10))
    keras.config.set_dtype_policy(BF16)
    inner = keras.Sequential([layers.Dense(4)], name="inner")
    cast, embedding, pool = layers.Identity(), layers.Embedding(5000, 4, name="ids"), layers.GlobalAveragePooling1D()
    keras.config.set_dtype_policy("float32")
    model = net(ids, lambda x: pool(inner(embedding(cast(x)))))
    report = check(model, (ids.astype("float32"), np.arange(16) % 3), {})
    assert report.problems[0].startswith("'ids' gets ids rounded to bfloat16")
    assert report.problems[0].endswith("or keep 'ids' in float32.")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_the_constant_of_a_mask_is_named():
    class Masked(layers.Layer):
        def call(self, x):
            mask = ops.cast(x > 0, x.dtype)
            return x * mask + (1 - mask) * -1e9

    model = net(SEQUENCES[:, 0], lambda x: layers.Softmax(name="softmax")(Masked(name="masked")(layers.Dense(8)(x))))
    report = check(model, (SEQUENCES[:, 0], LABELS), "mixed_float16")
    assert report.problems[0].startswith("'masked' is NaN or infinite in float16, the first layer to be so: 100 %")
    assert "Its constant -1e+09 is beyond 65504, float16's largest value" in report.problems[0]


@pytest.mark.slow
def test_a_dtype_that_the_model_was_made_with_cannot_be_judged():
    keras.config.set_dtype_policy(BF16)

    def body(x):
        x = layers.Dense(8, name="first")(x)
        places = ops.cast(ops.arange(LENGTH), x.dtype)[:, None] * ops.cast(0.5 ** ops.arange(8.0), x.dtype)
        return layers.GlobalAveragePooling1D(name="pool")(x + ops.sin(ops.cast(places, x.dtype)) * layers.Identity()(x))

    model = net(SEQUENCES, body)
    keras.config.set_dtype_policy("float32")
    apply(model, BF16)
    report = check(model, (SEQUENCES, LABELS), BF16)
    assert report.problems[0].startswith("Operations between layers, at ")
