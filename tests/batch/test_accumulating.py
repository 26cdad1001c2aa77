"""Several accumulated batches train as one large batch of their examples does."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

import tfopt
from tfopt.batch import accumulate

LARGE, SMALL, STEPS = 16, 4, 4
EXAMPLES = 42  # batches of 16, 16 and 10, or rounds of 4, 4 and 3, whose last batch has 2
random = np.random.default_rng(0)
X = random.normal(size=(EXAMPLES, 6))
Y = random.normal(size=(EXAMPLES, 2))
WEIGHTS = random.random(EXAMPLES)
IDS = random.integers(1, 9, size=(EXAMPLES, 5)) * (np.arange(5) < random.integers(1, 6, size=(EXAMPLES, 1)))
IDS[16:32] = 0  # of the second round nothing is left
TOKENS = random.normal(size=(EXAMPLES, 5, 2))
DENSE = keras.layers.Dense
optimizers = keras.optimizers


@pytest.fixture(autouse=True)
def _in_float64():
    """Rounding in float32 would be larger than some errors."""
    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before)


class Case:
    """A model, its data, and how it is compiled."""

    def __init__(self, optimizer=lambda: optimizers.SGD(0.1, momentum=0.9), layers=(), data=(X, Y), **options):
        self.optimizer, self.layers, self.data, self.options = optimizer, layers, data, options

    def model(self, kind=keras.Sequential, **options):
        keras.utils.set_random_seed(1)
        layers = [make() for make in self.layers] or [DENSE(8, activation="tanh"), DENSE(2)]
        model = kind([keras.Input(self.data[0].shape[1:]), *layers])
        model.compile(
            self.optimizer(), **{"loss": "mse", "metrics": ["mae"], "jit_compile": False} | self.options | options
        )
        return model

    def dataset(self, batch):
        return tf.data.Dataset.from_tensor_slices(self.data).batch(batch)


def accumulating(case, steps=STEPS, **options):
    model = case.model(**options)
    assert accumulate(model, steps) == 1
    return model


def state(model):
    return [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]


def assert_same(found, expected, tolerance=1e-9):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def schedule():
    return optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


def averaged():
    return optimizers.SGD(0.5, weight_decay=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)


REGULARIZED = (
    lambda: DENSE(8, kernel_regularizer="l2", activity_regularizer="l1"),
    lambda: DENSE(2, kernel_constraint=keras.constraints.MaxNorm(0.3)),
)
EMBEDDED = (lambda: keras.layers.Embedding(9, 4, mask_zero=True), lambda: DENSE(2))
PLAIN = (lambda: keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D, lambda: DENSE(2))
CASES = {
    "adamw, schedule, global clipnorm": Case(
        lambda: optimizers.AdamW(schedule(), weight_decay=0.1, global_clipnorm=0.5)
    ),
    "regularizers, constraint, sample weights": Case(layers=REGULARIZED, data=(X, Y, WEIGHTS), weighted_metrics=[]),
    "mask": Case(layers=EMBEDDED, data=(IDS, TOKENS)),
    "sgd": Case(),
    "adam": Case(lambda: optimizers.Adam(0.01, clipnorm=0.1)),
    "averages of weights": Case(averaged),
    "clipvalue": Case(lambda: optimizers.RMSprop(0.01, clipvalue=0.05)),
    "constant loss scale": Case(lambda: optimizers.SGD(0.1, loss_scale_factor=8.0)),
    "mean by sample weight": Case(
        data=(X, Y, WEIGHTS),
        loss=keras.losses.MeanSquaredError("mean_with_sample_weight", dtype="float64"),
        weighted_metrics=[],
    ),
    "sparse gradients": Case(layers=PLAIN, data=(IDS, Y)),
    "a function that averages": Case(loss=lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2)),
    "a function that averages, mask": Case(
        layers=EMBEDDED,
        data=(np.maximum(IDS, np.eye(5, dtype=int)[0]), TOKENS),  # if all are masked, Keras makes 0 of the mean
        loss=lambda y, y_pred: keras.ops.mean((y - y_pred) ** 2),
    ),
    "dice of each example": Case(
        layers=(lambda: DENSE(2, activation="sigmoid"),),
        data=(X, np.abs(Y)),
        loss=keras.losses.Dice(axis=-1, dtype="float64"),
    ),
}
LOGS_DIFFER = ("mask", "mean by sample weight")  # fit averages a loss over batches by their examples


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
@pytest.mark.parametrize("name", first_quick(CASES, 3))
def test_weights_state_and_logs_are_those_of_the_large_batch(name, jit_compile):
    case = CASES[name]
    large = case.model(jit_compile=jit_compile)
    expected = large.fit(case.dataset(LARGE), epochs=3, shuffle=False, verbose=0).history
    model = accumulating(case, jit_compile=jit_compile)
    found = model.fit(case.dataset(SMALL), epochs=3, shuffle=False, verbose=0).history
    assert_same(state(model), state(large))
    assert model.optimizer.iterations == 9
    for key, values in expected.items():
        if name not in LOGS_DIFFER or key != "loss":
            np.testing.assert_allclose(found[key], values, rtol=1e-9)


class OwnStep(keras.Sequential):
    """A custom training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.optimizer.scale_loss(self.compute_loss(x=x, y=y, y_pred=y_pred))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return self.compute_metrics(x, y, y_pred)


WAYS = {
    "overlapped": {},
    "executions": {"steps_per_execution": 3},
    "under XLA": {"jit_compile": True},
    "eagerly": {"run_eagerly": True},
    "a custom train_step": {"kind": OwnStep},
    "length unknown": {},
    "overlapped, length unknown": {},
    "arrays": {},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("way", first_quick(WAYS, 2))
def test_however_it_is_trained(way):
    case = CASES["adamw, schedule, global clipnorm"]
    large = case.model()
    large.fit(case.dataset(LARGE), epochs=3, shuffle=False, verbose=0)
    model, data = accumulating(case, **WAYS[way]), case.dataset(SMALL)
    if "overlapped" in way:
        tfopt.fit.overlap(model)
    if "unknown" in way:
        data = data.filter(lambda x, y: True)
    given = {"x": data} if way != "arrays" else {"x": X, "y": Y, "batch_size": SMALL}
    model.fit(**given, epochs=1, shuffle=False, verbose=0)
    model.fit(**given, epochs=2, shuffle=False, verbose=0)
    assert_same(state(model), state(large))


@pytest.mark.slow
def test_calls_of_train_on_batch_go_on_with_a_round():
    case = Case()
    large = case.model()
    for x, y in case.dataset(LARGE):
        large.train_on_batch(x, y)
    model = accumulating(case)
    for x, y in case.dataset(SMALL):
        model.train_on_batch(x, y)
    assert model.optimizer.iterations == 2
    assert accumulate(model, STEPS) == STEPS  # ends the open round
    assert_same(state(model), state(large))


def test_validation_and_callbacks_see_the_update_at_an_epochs_end():
    case, seen = Case(), []
    model = accumulating(case)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(int(model.optimizer.iterations)))
    history = model.fit(
        case.dataset(SMALL), validation_data=case.dataset(SMALL), shuffle=False, verbose=0, callbacks=[note]
    ).history
    assert history["val_loss"] == [pytest.approx(model.evaluate(case.dataset(SMALL), verbose=0)[0])]
    assert seen == [3]


def float16(y, scale=2.0**15, **options):
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")

    def optimizer():
        return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, clipnorm=1.0), scale, dynamic_growth_steps=3)

    return Case(optimizer, data=(X, y), **options)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
def test_an_overflow_in_one_batch_skips_what_the_large_batch_skips(jit_compile):
    y = Y.copy()
    y[20:24] = 1e4  # in the second batch of the second round
    case = float16(y, jit_compile=jit_compile)
    large, model = case.model(), accumulating(case)
    for trained, batch in ((large, LARGE), (model, SMALL)):
        trained.fit(case.dataset(batch), epochs=3, shuffle=False, verbose=0)
    assert model.optimizer.iterations == large.optimizer.iterations == 6
    assert model.optimizer.dynamic_scale.numpy() == large.optimizer.dynamic_scale.numpy() == 2.0**12
    assert model.optimizer.step_counter.numpy() == large.optimizer.step_counter.numpy()
    assert_same(state(model), state(large), 5e-3)


@pytest.mark.parametrize("jit_compile", first_quick([False, True], 0))
def test_float16_and_a_scale_that_grows(jit_compile):
    case = float16(Y, scale=2.0**8, jit_compile=jit_compile)
    large, model = case.model(), accumulating(case)
    for trained, batch in ((large, LARGE), (model, SMALL)):
        trained.fit(case.dataset(batch), epochs=3, shuffle=False, verbose=0)
    assert model.optimizer.dynamic_scale.numpy() == large.optimizer.dynamic_scale.numpy() == 2.0**11
    assert_same(state(model), state(large), 5e-3)


@pytest.mark.slow
def test_two_outputs_and_a_model_that_is_not_built():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second = DENSE(2, kernel_regularizer="l2"), DENSE(2)

        def call(self, inputs):
            return self.first(inputs), self.second(inputs)

    def trained(batch, steps):
        keras.utils.set_random_seed(1)
        model = Pair()
        model.compile(optimizers.Adam(0.1), ["mse", "mae"], loss_weights=[1.0, 0.3], jit_compile=steps > 1)
        accumulate(model, steps)
        model.fit(X, [Y, -Y], batch_size=batch, epochs=2, shuffle=False, verbose=0)
        return state(model)

    assert_same(trained(SMALL, STEPS), trained(LARGE, 1))


@pytest.mark.slow
def test_batch_norm_sees_each_batch_by_itself():
    case = Case(layers=(keras.layers.BatchNormalization, lambda: DENSE(2)))
    large, model = case.model(), accumulating(case)
    for trained, batch in ((large, LARGE), (model, SMALL)):
        trained.fit(case.dataset(batch), shuffle=False, verbose=0)
    differences = [np.abs(one - other).max() for one, other in zip(state(model), state(large), strict=True)]
    assert max(differences) > 1e-3
