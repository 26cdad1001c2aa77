"""D23, and that no other optimizer's first steps differ between graph and eager execution."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick
from versions import since_keras

import tfopt
from tfopt import repairs

OPTIMIZERS = keras.optimizers
RANDOM = np.random.default_rng(0)
VALUES = [RANDOM.normal(size=shape).astype("float32") for shape in ((3, 2), (2,))]
GRADIENTS = [[RANDOM.normal(size=value.shape).astype("float32") for value in VALUES] for _ in range(3)]
NAMES = [
    *("ScheduleFreeAdamW",) * hasattr(OPTIMIZERS, "ScheduleFreeAdamW"),
    *("Adam", "SGD", "Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lamb"),
    *("Lion", "Muon", "Nadam", "RMSprop"),
]
OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "averages": {"use_ema": True, "ema_overwrite_frequency": 2},
    "clipped": {"clipnorm": 0.1},
    "decay": {"weight_decay": 0.1},
    "schedule": {"learning_rate": OPTIMIZERS.schedules.ExponentialDecay(0.1, 1, 0.5)},
}
schedule_free = since_keras("3.14")  # which has the first ScheduleFreeAdamW
X, Y = RANDOM.normal(size=(16, 4)).astype("float32"), RANDOM.normal(size=(16, 1)).astype("float32")


def after_three_steps(name, options, way, built, scaled=False):
    """The variables and the optimizer's slots after three updates."""
    variables = [keras.Variable(value) for value in VALUES]
    optimizer = getattr(OPTIMIZERS, name)(**options)
    if scaled:
        optimizer = OPTIMIZERS.LossScaleOptimizer(optimizer, initial_scale=8.0)
    if built:
        optimizer.build(variables)

    def step(*gradients):
        optimizer.apply(gradients, variables)

    if way != "eager":
        step = tf.function(step, autograph=False, jit_compile=way == "xla")
    for gradients in GRADIENTS:
        step(*map(tf.constant, gradients))
    return [variable.numpy() for variable in (*variables, *optimizer.variables) if len(variable.shape)]


def require_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"), first_quick([(name, options) for name in NAMES for options in OPTIONS], every=5)
)
def test_first_steps_in_a_graph_are_those_of_eager_execution(name, options):
    arguments = name, OPTIONS[options]
    expected = after_three_steps(*arguments, "eager", built=True)
    with repairs.SCHEDULE_FREE.during():
        require_same(after_three_steps(*arguments, "graph", built=False), expected)
        require_same(after_three_steps(*arguments, "graph", built=True), expected)


@schedule_free
@pytest.mark.slow
@pytest.mark.parametrize(("way", "scaled"), [("xla", False), ("graph", True), ("eager", False)])
def test_it_begins_with_the_weights_in_every_way(way, scaled):
    expected = after_three_steps("ScheduleFreeAdamW", {}, "eager", built=True, scaled=scaled)
    with repairs.SCHEDULE_FREE.during():
        require_same(after_three_steps("ScheduleFreeAdamW", {}, way, built=False, scaled=scaled), expected)


def test_every_optimizer_of_keras_is_tried():
    kinds = {name for name in dir(OPTIMIZERS) if isinstance(getattr(OPTIMIZERS, name), type)}
    bases = {"Optimizer", "LossScaleOptimizer", "MultiOptimizer", "OptimizerMap"}
    assert kinds - bases == set(NAMES)


def model():
    net = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])  # not built: the first step builds it
    net.compile(OPTIMIZERS.ScheduleFreeAdamW(0.001), "mse", jit_compile=False)
    return net


def fit(net):
    net.fit(X, Y, batch_size=16, verbose=0)
    return net.get_weights()[0]


@schedule_free
def test_stock_keras_throws_the_weights_away():
    assert abs(fit(model())).max() < 0.1


@schedule_free
@pytest.mark.parametrize(
    "before", [tfopt.fit.overlap, lambda net: tfopt.distribute.strategy("auto"), lambda net: repairs.install()]
)
def test_a_step_of_fit_moves_the_weights_by_the_learning_rate(before):
    net = model()
    before(net)
    assert fit(net) == pytest.approx(1, abs=0.0011)


@schedule_free
def test_weights_loaded_after_it_was_built_are_where_it_begins():
    net = model()
    net.build((None, 4))
    net.optimizer.build(net.trainable_variables)
    net.set_weights([np.full((4, 1), 3.0), np.zeros(1)])
    repairs.install("schedule_free")
    assert fit(net) == pytest.approx(3, abs=0.0011)
