"""PruningSchedule: how masks grow during `fit`, that zeros stay zero, and what is cut afterwards."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from prunable_nets import NETS, inputs_of, randomized

from tfopt.callbacks import TrainingCheckpoint
from tfopt.compress import PruningSchedule
from tfopt.errors import PipelineError, UnsupportedError
from tfopt.kernels import chunk_cross_entropy

_L = keras.layers
pytestmark = pytest.mark.usefixtures("unmeasured")


def net(optimizer="adam", units=20, **options):
    layers = [keras.Input((6,)), _L.Dense(units, "sigmoid", name="hidden"), _L.BatchNormalization()]
    model = randomized(keras.Sequential([*layers, _L.Dense(3, name="logits")]))
    model.compile(optimizer, "mse", **options)
    return model


def dataset(model, steps):
    x = inputs_of(model, 4 * steps)
    y = np.random.default_rng(0).normal(size=(4 * steps, 3)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(4)


def zeros(kernel):
    """How many rows are zero: inputs that are not read."""
    return int((np.asarray(kernel) == 0).all(1).sum())


class Watch(keras.callbacks.Callback):
    """Zero rows after each batch; it runs after the schedule."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(zeros(self.model.get_layer("logits").kernel))


def fitted(model, schedule, steps=12, epochs=1):
    watch = Watch()
    model.fit(dataset(model, steps), shuffle=False, epochs=epochs, verbose=0, callbacks=[schedule, watch])
    return watch.seen


def assert_cut_computes_the_same(model, schedule):
    x = inputs_of(model, 5)
    pruned = schedule.cut()
    np.testing.assert_allclose(pruned.model(x), model(x), rtol=1e-4, atol=1e-6)
    return pruned


@pytest.mark.slow
def test_masks_grow_with_the_cube_and_stay_through_adam():
    model = net()
    schedule = PruningSchedule(dataset(model, 2), 0.5, begin_step=2, end_step=10, every_steps=2)
    seen = fitted(model, schedule, steps=7, epochs=2)
    shares = [0.5 * (1 - (1 - step / 8) ** 3) for step in (2, 4, 6, 8)]
    at = [20 - int(np.ceil(20 * (1 - share))) for share in shares]
    assert seen == [0, 0, 0, at[0], at[0], at[1], at[1], at[2], at[2], *[at[3]] * 5]
    assert at[3] == 10
    pruned = assert_cut_computes_the_same(model, schedule)
    assert pruned.kept == {"hidden": (10, 20)}
    assert pruned.sparsity == 0.5
    assert int(pruned.model.optimizer.iterations) == 0


@pytest.mark.slow
def test_zeros_hold_within_several_steps_per_execution():
    model = net(steps_per_execution=4)
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=4)
    assert fitted(model, schedule) == [10, 10, 10]
    assert_cut_computes_the_same(model, schedule)


@pytest.mark.slow
def test_a_second_fit_goes_on_and_a_fit_without_the_callback_is_free_again():
    model = net("sgd")
    model.fit(dataset(model, 1), shuffle=False, verbose=0)  # its traced step has no masks
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=8, every_steps=2)
    with pytest.warns(UserWarning, match=r"after 4 steps, before end_step=8, so that only 0.88 of the sparsity of 0.5"):
        assert fitted(model, schedule, 4) == [0, 5, 5, 8]
    before = np.asarray(model.get_layer("logits").kernel)
    seen = fitted(model, schedule, 6)
    assert seen == [8, 9, 9, 10, 10, 10]
    assert not np.asarray(model.get_layer("logits").kernel)[(before == 0).all(1)].any()
    assert model.get_layer("logits").kernel.constraint is None
    model.fit(dataset(model, 1), shuffle=False, verbose=0)
    assert zeros(model.get_layer("logits").kernel) == 0


@pytest.mark.slow
def test_a_constraint_of_the_layer_still_holds():
    model = net()
    kernel = model.get_layer("logits").kernel
    own = kernel.constraint = keras.constraints.MaxNorm(0.1)
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=1)
    assert fitted(model, schedule, 3)[-1] == 10
    assert np.linalg.norm(np.asarray(kernel), axis=0).max() < 0.101
    assert kernel.constraint is own


@pytest.mark.slow
def test_a_loss_that_is_not_computed_for_evaluation_as_for_training():
    x = keras.Input((5,), dtype="int32")
    model = keras.Model(x, _L.Dense(7)(_L.Dense(20, name="hidden")(_L.Embedding(7, 4)(x))))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    chunk_cross_entropy(model)
    ids = np.arange(40).reshape(8, 5) % 7
    schedule = PruningSchedule((ids, ids), 0.5, end_step=2, every_steps=1)
    model.fit(ids, ids, batch_size=2, verbose=0, callbacks=[schedule])
    np.testing.assert_allclose(schedule.cut().model(ids), model(ids), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_averaged_weights_are_masked_too():
    model = net(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=2)
    fitted(model, schedule, 4)
    assert zeros(model.get_layer("logits").kernel) == 10
    assert_cut_computes_the_same(model, schedule)


def test_what_sets_masked_weights_after_the_training_is_noticed():
    model = net()
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=1)
    before = model.get_weights()
    fitted(model, schedule, 3)
    model.set_weights(before)
    with pytest.raises(ValueError, match="masked as the training left them"):
        schedule.cut()


@pytest.mark.slow
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path):
    def trained(folder, *callbacks):
        model = net()
        schedule = PruningSchedule(dataset(model, 2), 0.5, begin_step=1, end_step=9, every_steps=2)
        callbacks = [schedule, TrainingCheckpoint(folder, every_steps=3), *callbacks]
        model.fit(dataset(model, 5), shuffle=False, epochs=2, verbose=0, callbacks=callbacks)
        return model, schedule

    class Crash(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 7:
                raise RuntimeError

    truth = trained(tmp_path / "whole")[0].get_weights()
    with pytest.raises(RuntimeError):
        trained(tmp_path / "part", Crash())
    model, schedule = trained(tmp_path / "part")
    for found, expected in zip(model.get_weights(), truth, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert assert_cut_computes_the_same(model, schedule).kept == {"hidden": (10, 20)}


class Forgetful(keras.layers.Layer):
    """Its config leaves its factor out."""

    factor = 1.0

    def call(self, x):
        return self.factor * x


def test_what_would_fail_in_the_middle_or_at_the_end_of_training_is_refused_when_it_begins():
    model = net()
    x, y = inputs_of(model, 8), np.zeros((8, 3), "float32")
    forgetful = Forgetful()
    forgetful.factor = 3.0
    wrong = keras.Sequential([keras.Input((6,)), _L.Dense(8), forgetful, _L.Dense(8), _L.Dense(3)])
    wrong.compile("sgd", "mse")
    for trained, data, error, message in (
        (model, (x, y[:, :2]), ValueError, "can be evaluated"),
        (model, tf.data.Dataset.from_tensors((x, y)).take(0), PipelineError, "at least one batch"),
        (wrong, (x, y), UnsupportedError, "Expected a clone to compute what it should"),
    ):
        with pytest.raises(error, match=message):
            trained.fit(x, y, verbose=0, callbacks=[PruningSchedule(data, end_step=1000)])


@pytest.mark.slow
def test_data_without_a_gradient_do_not_end_a_training():
    model, (x, y) = net(), next(iter(dataset(net(), 1)))
    schedule = PruningSchedule((x, y, np.zeros(len(x), "float32")), 0.5, end_step=4, every_steps=2)
    with pytest.warns(UserWarning, match="chosen by the norm of their weights"):
        fitted(model, schedule, steps=6)
    assert_cut_computes_the_same(model, schedule)


@pytest.mark.slow
def test_an_interrupted_fit_leaves_nothing_behind_for_the_next():
    model = net()
    schedule = PruningSchedule(dataset(model, 2), 0.5, end_step=1)
    broken = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(dataset(model, 3), shuffle=False, verbose=0, callbacks=[schedule, broken])
    assert fitted(model, schedule, 3)[-1] == 10
    assert model.get_layer("logits").kernel.constraint is None


@pytest.mark.slow
def test_heads_and_metrics_of_several_outputs():
    x = keras.Input((5, 6))
    y = _L.MultiHeadAttention(4, 3, name="attention")(x, x)
    model = randomized(keras.Model(x, [_L.Dense(3, name="a")(y), _L.Dense(2, name="b")(y)]))
    model.compile("adam", ["mse", "mae"])
    data = inputs_of(model, 8), (np.ones((8, 5, 3), "float32"), np.ones((8, 5, 2), "float32"))
    schedule = PruningSchedule(data, 0.5, end_step=1)
    logs = [model.fit(*data, verbose=0, shuffle=False, callbacks=each).history for each in ([], [schedule])]
    assert set(logs[0]) == set(logs[1])
    x = data[0]
    pruned = schedule.cut()
    for truth, found in zip(model(x), pruned.model(x), strict=True):
        np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-6)
    assert pruned.kept["attention (heads)"] == (2, 4)


def test_wrong_arguments():
    model = net()
    data = dataset(model, 1)
    for arguments, error, message in (
        ({"end_step": -1}, ValueError, "Expected end_step to be at least 0"),
        ({"end_step": 3, "begin_step": 4}, ValueError, "Expected end_step to be at least 4"),
        ({"end_step": 3, "every_steps": 0}, ValueError, "Expected every_steps to be an integer of at least 1"),
        ({"end_step": 3, "sparsity": 1}, ValueError, "Expected sparsity to be below 1"),
        ({"end_step": 3, "importance": "size"}, ValueError, "Expected an importance"),
    ):
        with pytest.raises(error, match=message):
            PruningSchedule(data, **arguments)
    with pytest.raises(ValueError, match=r"Found: no training yet. Call fit"):
        PruningSchedule(data, end_step=3).cut()
    flat = keras.Sequential([keras.Input((6,)), _L.Dense(3)])
    flat.compile("sgd", "mse")
    with pytest.raises(UnsupportedError, match=re.escape("channels, units or heads that can be cut")):
        fitted(flat, PruningSchedule(data, end_step=3))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mobilenet", "vit", "two_ways"])
def test_a_cut_net_computes_what_the_trained_one_does(name):
    model = randomized(NETS[name]())
    model.compile("adam", "mse")
    x = inputs_of(model, 8)
    y = keras.tree.map_structure(lambda part: np.zeros(part.shape, "float32"), model(x))
    schedule = PruningSchedule((x, y), 0.5, end_step=4, every_steps=1)
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[schedule])
    for truth, found in zip(
        *(keras.tree.flatten(one(x, training=False)) for one in (model, schedule.cut().model)), strict=True
    ):
        np.testing.assert_allclose(found, truth, rtol=1e-3, atol=1e-5)
