import csv
import json
import os

import keras
import numpy as np
import psutil
import pytest
import tensorflow as tf
from models import assert_same_state, state

from tfopt.callbacks import LossScaleLogger
from tfopt.precision import apply

KEYS = ("loss_scale", "skipped_steps", "loss_scale_growths")


def dataset(batches=5, infinite=()):
    """Batches of four; those at the places given overflow."""
    random, weights = np.random.default_rng(0), np.ones(4 * batches, "float32")
    for place in infinite:
        weights[4 * place : 4 * place + 4] = np.inf
    rows = random.normal(size=(4 * batches, 6)).astype("float32"), random.normal(size=(4 * batches, 1)), weights
    return tf.data.Dataset.from_tensor_slices(rows).batch(4)


def net(optimizer, policy="mixed_float16", base=keras.Sequential, **options):
    keras.utils.set_random_seed(7)
    layers = keras.layers
    half, head = layers.Dense(4, dtype=policy, name="half"), layers.Dense(1, dtype="float32", name="head")
    model = base([keras.Input((6,)), half, layers.ReLU(dtype=policy), head])
    model.compile(optimizer, "mse", **{"jit_compile": False} | options)
    return model


def scaled(*, scale=1.0, growth=2000, inner=None, **options):
    """From a scale of one: what overflows is what the test makes overflow."""
    inner = inner or keras.optimizers.Adam(1e-3)
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=scale, dynamic_growth_steps=growth)
    return net(optimizer, **options)


def fit(model, data, logger=None, **options):
    options = {"verbose": 0, "shuffle": False, "callbacks": [logger or LossScaleLogger()]} | options
    history = model.fit(data, **options).history
    return {key: history[key] for key in KEYS if key in history}


def rows(folder):
    return [json.loads(line) for line in (folder / "loss_scale.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_scale_skipped_steps_and_growths(jit_compile):
    model = scaled(growth=3, jit_compile=jit_compile)
    # Three good steps double the scale, a skipped one halves it; the count of good steps goes on in the next epoch.
    figures = fit(model, dataset(6, infinite=[3]), epochs=2)
    assert figures == {"loss_scale": [1.0, 1.0], "skipped_steps": [1, 1], "loss_scale_growths": [1, 1]}
    assert model.optimizer.iterations.numpy() == 10


def test_a_growth_that_two_epochs_make():
    figures = fit(scaled(growth=6), dataset(4), epochs=3)
    assert figures == {"loss_scale": [1.0, 2.0, 4.0], "skipped_steps": [0, 0, 0], "loss_scale_growths": [0, 1, 1]}


def test_the_scale_that_compile_adds():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4), keras.layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse", jit_compile=False)
    figures = fit(model, dataset(4))
    # Each overflow at the start halves Keras' first scale.
    assert figures["loss_scale"] == [2.0**15 / 2 ** figures["skipped_steps"][0]]


def test_rows_in_files(tmp_path):
    model = scaled()
    fit(model, dataset(5, infinite=[0, 4]), LossScaleLogger(tmp_path), epochs=2)
    fit(model, dataset(3), LossScaleLogger(tmp_path))
    expected = [(0, 5, 0.25, 2, 0), (1, 5, 0.0625, 2, 0), (0, 3, 0.0625, 0, 0)]
    columns = ("epoch", "steps", *KEYS)
    assert [tuple(row[column] for column in columns) for row in rows(tmp_path)] == expected
    assert {row["optimizer"] for row in rows(tmp_path)} == {"optimizer"}
    with open(tmp_path / "loss_scale.csv", newline="") as file:
        assert [tuple(float(row[column]) for column in columns) for row in csv.DictReader(file)] == expected
    fit(model, dataset(3), LossScaleLogger(tmp_path / "one", formats=["csv"]))
    assert sorted(os.listdir(tmp_path / "one")) == ["loss_scale.csv"]


@pytest.mark.slow
def test_training_is_the_same_with_it(tmp_path):
    plain, logged = scaled(growth=3), scaled(growth=3)
    plain.fit(dataset(6, infinite=[2]), epochs=2, verbose=0, shuffle=False)
    fit(logged, dataset(6, infinite=[2]), LossScaleLogger(tmp_path), epochs=2)
    assert_same_state(state(plain), state(logged))


def test_no_variable_is_read_in_a_step(monkeypatch):
    model, read = scaled(), []
    fit(model, dataset(2))
    original = type(model.optimizer.dynamic_scale).numpy
    monkeypatch.setattr(
        type(model.optimizer.dynamic_scale), "numpy", lambda variable: read.append(variable.name) or original(variable)
    )
    fit(model, dataset(20), epochs=2)
    assert len(read) == 2 * 2 * 3  # scale, counter and iterations, at the start and the end of each epoch


def test_gradient_accumulation_counts_steps_not_updates():
    model = scaled(inner=keras.optimizers.Adam(1e-3, gradient_accumulation_steps=2))
    figures = fit(model, dataset(6, infinite=[1]))
    assert figures == {"loss_scale": [0.5], "skipped_steps": [1], "loss_scale_growths": [0]}


def test_several_steps_an_execution():
    """Six steps, the last execution shorter."""
    model = scaled(steps_per_execution=4, growth=4)
    figures = fit(model, dataset(6, infinite=[0]))
    assert figures == {"loss_scale": [1.0], "skipped_steps": [1], "loss_scale_growths": [1]}


@pytest.mark.filterwarnings("ignore:.*ran out of data")
@pytest.mark.parametrize("execution", [1, 4])
def test_data_of_unknown_length(tmp_path, execution):
    unknown = dataset(6, infinite=[0]).filter(lambda *row: True)
    figures = fit(scaled(steps_per_execution=execution), unknown, LossScaleLogger(tmp_path), epochs=2)
    assert figures == {"loss_scale": [0.5, 0.25], "skipped_steps": [1, 1], "loss_scale_growths": [0, 0]}
    assert [row["steps"] for row in rows(tmp_path)] == [6, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_executions_that_do_not_end_with_the_epoch_or_the_data(tmp_path):
    """Of 10 steps, four an execution, Keras runs 12; of data of six steps, six."""
    longer = dataset(12, infinite=[1, 5, 6]).repeat()
    figures = fit(scaled(growth=2, steps_per_execution=4), longer, LossScaleLogger(tmp_path), steps_per_epoch=10)
    assert figures == {"loss_scale": [1.0], "skipped_steps": [3], "loss_scale_growths": [3]}
    shorter = dataset(6, infinite=[5])
    figures = fit(scaled(growth=2, steps_per_execution=4), shorter, LossScaleLogger(tmp_path), steps_per_epoch=100)
    assert figures == {"loss_scale": [2.0], "skipped_steps": [1], "loss_scale_growths": [2]}
    assert [row["steps"] for row in rows(tmp_path)] == [12, 6]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_counts_that_several_numbers_of_steps_explain_are_left_out(tmp_path):
    """Four skips and four growths in 16 steps leave what three of both in 15 could have left."""
    data = dataset(16, infinite=[3, 7, 11, 15])
    assert fit(scaled(growth=3, steps_per_execution=4), data)["skipped_steps"] == [4]  # all of 16, as the data says
    data = data.filter(lambda *row: True)
    assert fit(scaled(growth=3, steps_per_execution=4), data, LossScaleLogger(tmp_path)) == {"loss_scale": [1.0]}
    assert [(row["steps"], row["skipped_steps"]) for row in rows(tmp_path)] == [(None, None)]


def test_generators_eager_and_partial_epochs():
    endless = (tuple(part.numpy() for part in row) for row in dataset(40, infinite=[1, 9]))
    figures = fit(scaled(), endless, steps_per_epoch=5, epochs=2)
    assert figures["skipped_steps"] == [1, 1]
    assert fit(scaled(run_eagerly=True, jit_compile=False), dataset(3, infinite=[1]))["skipped_steps"] == [1]


def test_it_can_be_fitted_with_again_after_an_exception(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 2:
                raise RuntimeError

    model, logger = scaled(), LossScaleLogger(tmp_path)
    with pytest.raises(RuntimeError):
        fit(model, dataset(6, infinite=[0, 1]), callbacks=[logger, Fails()])
    assert fit(model, dataset(6, infinite=[5]), logger) == {
        "loss_scale": [0.125],
        "skipped_steps": [1],
        "loss_scale_growths": [0],
    }
    assert [row["skipped_steps"] for row in rows(tmp_path)] == [1]
    assert not [file.path for file in psutil.Process().open_files() if file.path.startswith(str(tmp_path))]


def test_an_epoch_that_skips_every_step_is_warned_of_once(tmp_path):
    model, logger = scaled(), LossScaleLogger(tmp_path)
    with pytest.warns(UserWarning, match=r"Expected finite gradients.*Found all.*skipped.*precision\.check") as record:
        figures = fit(model, dataset(3, infinite=[0, 1, 2]), logger, epochs=3)
    assert sum(warning.category is UserWarning for warning in record) == 1
    assert figures["skipped_steps"] == [3, 3, 3]
    assert figures["loss_scale"] == [2.0**-3, 2.0**-6, 2.0**-9]


def test_a_scale_that_falls_to_zero_is_still_followed(tmp_path):
    model = scaled(scale=2.0**-147)
    with pytest.warns(UserWarning, match="all of them skipped"):
        figures = fit(model, dataset(8, infinite=range(8)), LossScaleLogger(tmp_path), epochs=2)
    assert figures["loss_scale"] == [0.0, 0.0]
    assert figures["skipped_steps"] == [8, 8]
    assert [row["loss_scale_growths"] for row in rows(tmp_path)] == [None, None]


def test_float16_without_loss_scaling_is_warned_of_once(tmp_path):
    """D7: Keras trains so without a word."""
    model, logger = net("adam", auto_scale_loss=False), LossScaleLogger(tmp_path)
    model.fit(dataset(2), verbose=0, shuffle=False)  # warnings are errors
    with pytest.warns(UserWarning, match=r"Found: Adam, while.*float16: .*half\. .*LossScaleOptimizer\(opt") as record:
        figures = [fit(model, dataset(2), logger) for _ in range(2)]
    assert figures == [{}, {}]
    assert len(record) == 1
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_where_no_scale_is_needed_it_says_so(policy):
    with pytest.warns(UserWarning, match="No loss scale is needed: remove LossScaleLogger"):
        assert fit(net("adam", policy), dataset(2)) == {}


def test_what_a_model_was_made_under_is_no_layer_that_computes():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    apply(model, "float32")
    with pytest.warns(UserWarning, match="no layer that computes in float16"):
        assert fit(model, dataset(2)) == {}


class Adversaries(keras.Model):
    """Two optimizers of its own; the one that compile makes is never used."""

    def __init__(self, optimizers, applied=1):
        super().__init__()
        self.parts = [keras.layers.Dense(1, dtype="float32") for _ in optimizers]
        self.first_optimizer, self.second_optimizer = optimizers
        self.applied = applied

    def call(self, x):
        return self.parts[1](self.parts[0](x))

    def train_step(self, data):
        x, _, weights = data
        for layer, optimizer in zip(self.parts, (self.first_optimizer, self.second_optimizer), strict=True):
            for _ in range(self.applied):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(self(x) ** 2) * tf.reduce_mean(weights)
                    loss = optimizer.scale_loss(loss)
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
        return {"x": tf.constant(1.0)}


def adversaries(applied=1, growth=2000):
    optimizers = [
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1e-3), initial_scale=scale, dynamic_growth_steps=growth
        )
        for scale in (4.0, 2.0)
    ]
    model = Adversaries(optimizers, applied)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse", jit_compile=False)
    model(np.zeros((1, 6)))
    for layer, optimizer in zip(model.parts, optimizers, strict=True):
        optimizer.build(layer.trainable_variables)
    return model


def test_each_optimizer_has_a_row_and_an_unused_one_none(tmp_path):
    figures = fit(adversaries(), dataset(5, infinite=[1]), LossScaleLogger(tmp_path))
    assert figures == {"loss_scale": [1.0], "skipped_steps": [2], "loss_scale_growths": [0]}
    found = {row["optimizer"]: (row["loss_scale"], row["skipped_steps"]) for row in rows(tmp_path)}
    assert found == {"first_optimizer": (2.0, 1), "second_optimizer": (1.0, 1)}


def test_a_train_step_that_applies_twice_has_a_scale_and_no_counts(tmp_path):
    figures = fit(adversaries(applied=2), dataset(5, infinite=[1]), LossScaleLogger(tmp_path))
    assert figures == {"loss_scale": [0.5]}
    assert {row["skipped_steps"] for row in rows(tmp_path)} == {None}
    assert fit(adversaries(applied=2, growth=2), dataset(5)) == {"loss_scale": [2.0 * 2**5]}


def test_a_train_step_that_applies_seldom_has_no_counts():
    class Seldom(keras.Sequential):
        def train_step(self, data):
            x, y, _ = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x)))
            gradients = tape.gradient(loss, self.trainable_variables)
            tf.cond(self.turn.assign_add(1) % 2 == 0, lambda: self.apply(gradients), lambda: 0)
            return {"x": tf.constant(1.0)}

        def apply(self, gradients):
            self.optimizer.apply(gradients, self.trainable_variables)
            return 0

    model = scaled(base=Seldom)
    model.turn = tf.Variable(0)
    model.optimizer.build(model.trainable_variables)
    assert fit(model, dataset(6)) == {"loss_scale": [1.0]}
