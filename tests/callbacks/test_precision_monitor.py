import json
import math
import warnings
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state, summed_in_one_order
from precision_matrix.own_steps import Own
from quick import campaign, first_quick

from tfopt import fit as tfopt_fit
from tfopt import precision
from tfopt.callbacks import PrecisionMonitor, precision_monitor
from tfopt.errors import UnsupportedError
from tfopt.precision.gate.repeated import RepeatedComparison

layers = keras.layers
_random = np.random.default_rng(0)
X = _random.normal(0, 0.3, size=(64, 8)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")


@pytest.fixture(autouse=True)
def _no_time_passes(set_clock):
    """A monitor has as much time as it wants."""
    set_clock(lambda: 0.0, PrecisionMonitor)


def always(**options):
    return PrecisionMonitor((X, Y), **{"every_steps": 1} | options)


def net(*first, policy="mixed_bfloat16", **compile_options):
    keras.utils.set_random_seed(1)
    body = [layers.Dense(16, activation="relu", dtype=policy, name="hidden"), layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input((8,)), *first, *body])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam", "loss": loss} | compile_options)
    return model


class Average(layers.Layer):
    """Divides by a moving average of squares, which is computed in the layer's dtype."""

    def __init__(self, momentum, *, dtype="mixed_bfloat16", initializer="ones"):
        super().__init__(dtype=dtype, name="average")
        self.momentum, self.initializer = momentum, initializer

    def build(self, shape):
        self.squares = self.add_weight(
            shape=(shape[-1],), initializer=self.initializer, trainable=False, name="squares"
        )

    def call(self, x, training=False):
        if training:
            new = keras.ops.mean(keras.ops.square(x), axis=0)
            self.squares.assign(self.momentum * self.squares + (1 - self.momentum) * new)
        return x / keras.ops.sqrt(self.squares + 0.01)


class Count(layers.Layer):
    """Counts its training calls, in the layer's dtype, and leaves its input as it is or does something with both."""

    def __init__(self, use=lambda x, count: x, *, start=0.0):
        super().__init__(dtype="mixed_bfloat16", name="count")
        self.use, self.start = use, start

    def build(self, shape):
        start = keras.initializers.Constant(self.start)
        self.calls = self.add_weight(shape=(), initializer=start, trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
        return self.use(x, self.calls)


def fit(model, monitor, epochs=3, **options):
    """The training's history, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(X, Y, batch_size=32, epochs=epochs, verbose=0, callbacks=[monitor], **options).history
    return history, [
        str(one.message) for one in caught if "PrecisionMonitor" in str(one.message) or "Found" in str(one.message)
    ]


# Training stays the same


class TwoNets(keras.Model):
    """Two nets with an optimizer each, as in a GAN, and nothing to call."""

    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(7)
        self.one, self.other = small_net("mixed_bfloat16", compiled=False), small_net("float32", compiled=False)
        self.optimizers = [keras.optimizers.Adam(), keras.optimizers.SGD(0.1)]

    def train_step(self, data):
        x, y = data
        losses = {}
        for name, net, optimizer in zip("ab", (self.one, self.other), self.optimizers, strict=True):
            with tf.GradientTape() as tape:
                outputs = net(x, training=True)
                loss = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
                losses[name] = keras.ops.mean(loss)
            gradients = tape.gradient(losses[name], net.trainable_variables)
            optimizer.apply(gradients, net.trainable_variables)
        return losses


def two_nets():
    model = TwoNets()
    model.compile("sgd", jit_compile=False)
    return model


class Noise(layers.Layer):
    """Draws from Keras' global seed generator, and from a tf.random.Generator of its own."""

    def __init__(self, **options):
        super().__init__(**options)
        self.generator = tf.random.Generator.from_seed(3)

    def call(self, x, training=False):
        if training:
            x += keras.random.normal(tf.shape(x), dtype=x.dtype) * 0.1
            x += tf.cast(self.generator.normal(tf.shape(x)), x.dtype) * 0.1
        return x


def noisy():
    keras.utils.set_random_seed(7)
    inputs = keras.Input((8, 8, 1))
    x = layers.Flatten()(Noise(dtype="mixed_bfloat16")(inputs))
    model = keras.Model(inputs, layers.Dense(10)(layers.Dense(8, dtype="mixed_bfloat16")(x)))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def with_own_step():
    stock = small_net("mixed_float16")
    model = Own(stock.inputs, stock.outputs)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), loss)
    return model


def unbuilt():
    keras.utils.set_random_seed(7)
    body = [layers.Flatten(), layers.Dense(8, dtype="mixed_bfloat16"), layers.Dropout(0.5), layers.Dense(10)]
    model = keras.Sequential(body)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def scaled(**options):
    adam = keras.optimizers.Adam()
    wrapped = keras.optimizers.LossScaleOptimizer(adam, initial_scale=2.0**30, dynamic_growth_steps=3)
    return small_net("mixed_float16", optimizer=wrapped, **options)


CASES = {
    "dropout, batch norm, metrics": (lambda: small_net("mixed_bfloat16"), {}),
    "not built": (unbuilt, {}),
    "float16, with steps that overflow": (scaled, {}),
    "XLA": (lambda: small_net("mixed_bfloat16", dropout=0.0, jit_compile=True), {}),
    "float16 and XLA": (lambda: scaled(dropout=0.0, jit_compile=True), {}),
    "several steps an execution": (lambda: small_net("mixed_bfloat16", steps_per_execution=2), {}),
    "overlap": (lambda: tfopt_fit.overlap(small_net("mixed_bfloat16")), {}),
    "class weights": (
        lambda: small_net("mixed_bfloat16"),
        {"class_weight": {label: 0.5 + label for label in range(10)}},
    ),
    "own train_step, float16": (with_own_step, {}),
    "two nets": (two_nets, {}),
    "global seed, tf.random.Generator": (noisy, {}),
    "eager": (lambda: small_net("mixed_bfloat16", run_eagerly=True), {}),
    "gradient accumulation": (
        lambda: small_net("mixed_bfloat16", optimizer=keras.optimizers.SGD(0.1, 0.9, gradient_accumulation_steps=2)),
        {},
    ),
}


REST = ("float16, with steps that overflow", "XLA", "class weights", "eager", "gradient accumulation")


@pytest.mark.slow
@pytest.mark.parametrize("case", first_quick([case for case in CASES if case not in REST]) + campaign(REST))
def test_training_stays_the_same(case):
    """Shuffled data, three epochs of a full and a smaller batch, with a comparison after each step."""
    make, options = CASES[case]
    found, readings = [], []
    for monitors in ([], [PrecisionMonitor(batch(8, seed=1), every_steps=1)]):
        model = make()
        keras.utils.set_random_seed(5)
        with summed_in_one_order():
            history = model.fit(*batch(40), batch_size=16, epochs=3, verbose=0, callbacks=monitors, **options).history
        found.append((history, state(model)))
        readings = [reading.step for monitor in monitors for reading in monitor.readings]
    (history, expected), (monitored, received) = found
    assert_same_state(expected, received)
    assert {key: monitored[key] for key in history} == history
    assert readings == ([2, 4, 6, 8, 10, 12] if "several" in case else [*range(1, 10)])


# What it finds


@pytest.mark.slow
def test_an_average_that_bfloat16_cannot_move():
    model, monitor = net(Average(0.999)), always()
    _, warned = fit(model, monitor)
    assert len(warned) == 1
    assert "Found after step 1: 'average/squares'" in warned[0]
    assert "100 % of that is lost to rounding" in warned[0]
    assert "Keep 'average' in float32" in warned[0]
    assert np.array_equal(model.get_layer("average").squares, np.ones(8))  # this is what it is about


@pytest.mark.parametrize(
    "make",
    [
        lambda: Average(0.999, dtype="float32"),
        lambda: Average(0.9),
        lambda: layers.BatchNormalization(dtype="mixed_bfloat16"),
    ],
    ids=["kept in float32", "quick enough for bfloat16", "Keras' batch norm"],
)
@pytest.mark.slow
def test_averages_that_move(make):
    monitor = always()
    assert fit(net(make()), monitor, epochs=20)[1] == []
    assert len(monitor.readings) == 40


@pytest.mark.parametrize(
    ("momentum", "off", "stuck"),
    [(0.99, 1.15, True), (0.99, 30.0, False), (0.9, 1.01, False)],
    ids=["too slow for bfloat16", "far from its goal", "within a rounding of its goal"],
)
@pytest.mark.slow
def test_where_an_average_would_end(momentum, off, stuck):
    """In bfloat16, steps of a hundredth of less than a fifth are lost; those of a tenth of 1 % are too, and small."""
    model = net(Average(momentum))
    goal = np.square(X).mean(0)
    model.get_layer("average").squares.assign(off * goal)
    (found,) = RepeatedComparison(model, (tf.constant(X), tf.constant(Y)))().states
    assert found.path == "average/squares"
    assert bool(found.problem) == stuck
    assert (found.error > 0.5) == (off < 2)


@pytest.mark.slow
def test_a_count_is_right_until_it_is_256():
    monitor = always()
    _, warned = fit(net(Count(start=249.0)), monitor, epochs=8)
    assert len(warned) == 1
    assert "'count/calls'" in warned[0]
    wrong = [reading.step for reading in monitor.readings if reading.problems]
    assert wrong[0] in range(4, 8)
    assert f"At step {wrong[0] - 1} nothing was wrong." in warned[0]
    assert wrong == [*range(wrong[0], 17)]


@pytest.mark.slow
def test_an_own_error_that_grows():
    def offset(x, count):
        large = keras.ops.cast(2.0 ** keras.ops.cast(count, "float32"), x.dtype) * 0.01
        return (x + large) - large

    monitor = always()
    _, warned = fit(net(Count(offset)), monitor, epochs=6)
    assert len(warned) == 1
    assert "'count'" in warned[0]
    errors = [reading.own_error for reading in monitor.readings]
    first = next(at for at, reading in enumerate(monitor.readings) if reading.problems)
    assert errors[0] < 0.02
    assert errors[first] > precision_monitor.LEAST_GROWN
    assert "At step" in warned[0]


@pytest.mark.slow
def test_a_loss_that_becomes_tiny_is_no_news():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(1, use_bias=False, dtype="mixed_bfloat16"), layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
    targets = X @ np.ones((8, 1), "float32")
    monitor = PrecisionMonitor((X, targets), every_steps=20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(
            np.tile(X, (8, 1)), np.tile(targets, (8, 1)), batch_size=32, epochs=15, verbose=0, callbacks=[monitor]
        )
    report = precision.check(model, (X, targets), {})
    assert report.loss_drift > 0.25  # the gate, which knows nothing of the beginning, would not pass it
    assert monitor.readings[-1].loss_drift < 0.05


@pytest.mark.slow
def test_a_training_that_diverged():
    model, monitor = net(), always()
    model.get_layer("hidden").trainable = False  # stays finite
    model.get_layer("head").kernel.assign(np.full((16, 2), np.nan))
    _, warned = fit(model, monitor)
    assert len(warned) == 1
    assert "NaN or infinite in float32 too, from 'head' on" in warned[0]
    assert not monitor.readings


# When, and what it says


class Clocked:
    """Stands in for the comparison: tracing and the first call take 50 seconds each, later ones as given."""

    def __init__(self, seconds):
        self.now, self.seconds, self.traced = 0.0, seconds, 0

    def __call__(self, model, batch):
        self.traced += 1
        self.now += 50
        layer = SimpleNamespace(path="hidden", own_error=0.01, output=True, input=None)
        found = SimpleNamespace(report=SimpleNamespace(layers=[layer]), problems=(), loss_drift=0.0)

        def compare():
            self.now += self.seconds
            return found

        def is_current(_):
            return True

        return type("Fake", (), {"model": model, "is_current": property(is_current), "__call__": lambda _: compare()})()


def trained(monkeypatch, set_clock, seconds, steps=2000, every_steps=100):
    """A monitor after steps of a second each, with comparisons that take some seconds."""
    clock = Clocked(seconds)
    monkeypatch.setattr(precision_monitor, "RepeatedComparison", clock)
    set_clock(lambda: clock.now, PrecisionMonitor)
    monitor = PrecisionMonitor((X, Y), every_steps=every_steps)
    monitor.set_model(net())
    monitor.on_train_begin()
    for epoch in range(2):
        monitor.on_epoch_begin(epoch)
        for step in range(steps // 2):
            clock.now += 1
            monitor.on_train_batch_end(step)
        monitor.on_epoch_end(epoch, logs := {})
    assert clock.traced == 1
    return monitor, logs


@pytest.mark.parametrize(("seconds", "gap"), [(0.5, 100), (1.0, 100), (2.5, 250)])
def test_comparisons_take_a_hundredth_of_the_time(monkeypatch, set_clock, seconds, gap):
    monitor, logs = trained(monkeypatch, set_clock, seconds)
    steps = [reading.step for reading in monitor.readings]
    assert steps[0] == 1
    assert np.diff(steps) == pytest.approx(gap, abs=gap / 50)
    assert monitor.share <= 0.01
    assert logs["precision_monitor_percent"] == pytest.approx(100 * monitor.share)
    assert (f"every {np.mean(np.diff(steps)):.0f} steps instead of 100 to stay below 1 %" in str(monitor)) == (
        gap > 100
    )


@pytest.mark.slow
def test_what_it_says():
    monitor = always(every_steps=2)
    history, _ = fit(net(Average(0.999)), monitor)
    assert {key for key in history if key.startswith("precision")} == {
        "precision_own_error_percent",
        "precision_loss_drift_percent",
        "precision_monitor_percent",
    }
    assert all(math.isfinite(value) for values in history.values() for value in values)
    assert [reading["step"] for reading in json.loads(json.dumps(monitor.to_dict()))["readings"]] == [1, 3, 5]
    assert str(monitor).startswith("3 comparisons with float32")
    assert "- step 1: 'average/squares'" in str(monitor)
    assert str(always()) == "No comparison with float32 yet."


@pytest.mark.slow
def test_it_is_traced_once_and_again_for_other_policies(monkeypatch):
    made = []
    original = precision_monitor.RepeatedComparison
    monkeypatch.setattr(precision_monitor, "RepeatedComparison", lambda *args: made.append(args) or original(*args))
    model, monitor = net(), always()
    fit(model, monitor)
    fit(model, monitor)
    assert len(made) == 1
    precision.apply(model, {"hidden": "mixed_float16"})
    fit(model, monitor)
    assert len(made) == 2


# What it refuses


def test_a_model_in_float32_is_said_to_need_none():
    monitor = always()
    _, warned = fit(net(policy="float32"), monitor)
    assert len(warned) == 1
    assert "Remove PrecisionMonitor" in warned[0]
    assert not monitor.readings


@pytest.mark.parametrize("policy", first_quick(["bfloat16", "float8"]))
def test_models_without_a_float32_reference(policy):
    model = net(policy="float32" if policy == "float8" else policy)
    if policy == "float8":
        precision.apply(model, {"hidden": policy})
    with pytest.raises(UnsupportedError, match="float32, the reference"):
        model.fit(X, Y, verbose=0, callbacks=[always()])


def test_other_strategies():
    monitor = always()
    monitor.set_model(net())
    monitor.model._distribute_strategy = SimpleNamespace(extended=None)
    with pytest.raises(UnsupportedError, match=r"MirroredStrategy.*Found SimpleNamespace"):
        monitor.on_train_begin()
    monitor.model._distribute_strategy = None


@pytest.mark.slow
def test_a_batch_that_does_not_fit_ends_the_monitor_only(caplog):
    monitor = PrecisionMonitor((X[:, :3], Y), every_steps=1)
    history, _ = fit(net(), monitor)
    assert len(history["loss"]) == 3
    assert "PrecisionMonitor stops; training goes on" in caplog.text


def test_bad_arguments():
    with pytest.raises(ValueError, match="every_steps"):
        always(every_steps=0)
    with pytest.raises(TypeError, match=r"Expected a tf\.data\.Dataset of batches"):
        PrecisionMonitor("data")
