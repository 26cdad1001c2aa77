"""Overlap switched on, off and on again, together with what else changes a model, and where it is refused."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from fitting import Pair, Steps, Trace, X, compiled, dataset, dense_net
from versions import nothing_fits

from tfopt import fit, measure, precision, xla
from tfopt.errors import UnsupportedError
from tfopt.fit import overlapping
from tfopt.fit.launching import overlap_of
from tfopt.fit.overlapping import PATCH
from tfopt.internals.training import TensorFlowTrainer

ONCE = {"verbose": 0, "shuffle": False}
# But for what tells callbacks of their fit, from the first one on.
STOCK = {name: value for name, value in vars(keras.callbacks.CallbackList).items() if name != "__init__"}


@pytest.fixture(autouse=True)
def _none_overlapped():
    """Each test begins and ends with Keras as it comes."""
    yield
    for model in list(overlapping._overlapped):
        fit.undo(model)
    PATCH.remove()  # a model that was collected has left it there
    assert {name: vars(keras.callbacks.CallbackList)[name] for name in STOCK} == STOCK


def names(model):
    return set(model.__dict__)


def fitted(model):
    return model.fit(dataset(), **ONCE).history


def test_it_returns_the_model_and_undo_leaves_nothing():
    model = dense_net()
    fitted(model)
    model.evaluate(dataset(), verbose=0)
    before, functions = names(model), (model.train_function, model.test_function)
    assert fit.overlap(model) is model
    assert PATCH.installed
    fitted(model)
    fit.undo(model)
    fit.undo(model)
    assert names(model) == before | {"history"}
    assert (model.train_function, model.test_function) == functions  # what was traced serves again
    assert model._make_function.__func__ is TensorFlowTrainer._make_function
    assert not PATCH.installed


def test_the_patch_goes_with_the_last_model():
    one, two = fit.overlap(dense_net()), fit.overlap(dense_net())
    fit.undo(one)
    assert PATCH.installed
    fit.undo(two)
    assert not PATCH.installed


def test_other_models_find_keras_as_it_comes(conversions):
    overlapped, other = fit.overlap(dense_net()), dense_net()
    other.fit(dataset(batch=4), **ONCE)
    assert conversions() == 10 + 2
    assert overlap_of(overlapped) is not overlap_of(other) is None


def test_a_list_of_callbacks_without_a_model():
    fit.overlap(dense_net())
    other, trace = dense_net(), Trace()
    assert other.predict(X, verbose=0, callbacks=keras.callbacks.CallbackList([trace])).shape == (40, 4)


def test_twice_is_once_with_the_new_settings(conversions, capsys):
    model = fit.overlap(fit.overlap(dense_net(), log_every=1), log_every=5, steps_in_flight=3)
    shown = {"add_history": True, "add_progbar": True, "verbose": 1, "epochs": 1, "steps": 10}
    callbacks = keras.callbacks.CallbackList(model=model, **shown)
    model.fit(dataset(batch=4), shuffle=False, callbacks=callbacks)
    assert conversions() == 3 + 2  # steps 1, 6 and 10
    fit.overlap(model, log_every=1)
    model.fit(dataset(batch=4), shuffle=False, callbacks=callbacks)
    assert conversions() == 5 + 10 + 2
    fit.undo(model)
    assert overlap_of(model) is None


@pytest.mark.slow
def test_before_compile_and_after_and_anew():
    Pair().train(lambda model: [fitted(model), fitted(compiled(model, optimizer="sgd"))])
    layers = [keras.Input((8,)), keras.layers.Dense(4)]
    model = compiled(fit.overlap(keras.Sequential(layers)))
    fitted(model)
    assert type(model.train_function).__name__ == "OverlappedStep"


@pytest.mark.slow
def test_with_xla_switched_and_float16_applied():
    """In either order: an overlapped model is switched, and a switched one overlapped."""

    def make():
        layers = [keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(4)]
        return compiled(keras.Sequential(layers), optimizer="sgd", metrics=[Steps()])

    def train(model):
        histories, trace = [fitted(model)], Trace()
        xla.set_jit(model, True)
        with xla.watch() as compilations:
            model.fit(dataset(), callbacks=[trace], **ONCE)
        assert compilations.count == 2  # for each batch shape
        if model is pair.overlapped:
            fit.overlap(fit.undo(model) or model)
        precision.apply(model, "mixed_bfloat16")
        assert model.layers[0].compute_dtype == "bfloat16"
        return [*histories, fitted(model), trace.calls]

    pair = Pair(make)
    pair.train(train)
    assert type(pair.overlapped.train_function).__name__ == "OverlappedStep"


def test_it_can_be_timed_and_comes_back_as_it_was():
    model = fit.overlap(dense_net())
    fitted(model)
    before = [weight.tobytes() for weight in model.get_weights()]
    assert measure.fit_time(model, dataset(), steps=20).median_ms > 0
    assert measure.step_time(model, dataset(), steps=5).median_ms > 0
    assert [weight.tobytes() for weight in model.get_weights()] == before
    fitted(model)


@pytest.mark.slow
def test_copies_are_not_overlapped(tmp_path):
    model = fit.overlap(dense_net())
    fitted(model)
    model.save(tmp_path / "kept.keras")
    loaded = keras.models.load_model(tmp_path / "kept.keras")
    for other in (loaded, keras.models.clone_model(model), copy.deepcopy(model)):
        assert overlap_of(other) is None
        assert "_make_function" not in other.__dict__
    assert np.array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert fitted(loaded).keys() == fitted(model).keys()


def test_a_train_function_of_ones_own_stays(conversions):
    def own(iterator):
        next(iterator)
        return {"loss": tf.constant(1.0)}

    model = dense_net(metrics=None)
    model.train_function = own
    fit.overlap(model)
    assert fitted(model)["loss"] == [0.0]  # Keras' own, of the model's metrics
    assert conversions() == 3 + 2
    assert model.train_function is own
    fit.undo(model)
    assert model.train_function is own


class OwnPredict(keras.Sequential):
    def predict(self, inputs, **options):
        return super().predict(inputs, **options)


def test_a_predict_of_ones_own():
    model = fit.overlap(OwnPredict([keras.Input((8,)), keras.layers.Dense(4)]))
    # The same batch sizes: with others a matrix product may add up in another order.
    assert np.array_equal(
        model.predict(inputs=X, batch_size=16, verbose=0), model.predict(dataset(X, X, batch=16), verbose=0)
    )


def test_undo_leaves_what_was_put_there_since():
    model = fit.overlap(dense_net())
    model.predict = lambda data: "mine"
    del model._make_function
    fit.undo(model)
    assert model.predict(X) == "mine"
    assert overlap_of(model) is None


class OwnFunction(keras.Sequential):
    def make_train_function(self, force=False):
        return super().make_train_function(force)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "20", None])
@pytest.mark.parametrize("name", ["log_every", "steps_in_flight"])
def test_counts_are_integers_of_at_least_one(name, value):
    model = dense_net()
    with pytest.raises(ValueError, match=rf"Expected {name} to be an integer of at least 1\. Received: {name}="):
        fit.overlap(model, **{name: value})
    assert overlap_of(model) is None


@pytest.mark.parametrize("call", [fit.overlap, fit.undo])
def test_only_models(call):
    with pytest.raises(TypeError, match=r"Expected a keras\.Model\. Received: .* of type Dense"):
        call(keras.layers.Dense(1))


def test_models_that_override_what_it_replaces_are_refused():
    own = OwnFunction([keras.Input((8,)), keras.layers.Dense(4)])
    with pytest.raises(UnsupportedError, match=r"Keras' own make_train_function\. Found that .* \(OwnFunction\)"):
        fit.overlap(own)
    patched = dense_net()
    patched.__dict__["_make_function"] = patched._make_function
    with pytest.raises(UnsupportedError, match=r"own _make_function\. .* without overlap, or move"):
        fit.overlap(patched)
    assert not PATCH.installed


def test_other_strategies_are_refused():
    strategy = tf.distribute.experimental.CentralStorageStrategy(["CPU:0"], "CPU:0")
    with strategy.scope():
        model = dense_net()
    with pytest.raises(UnsupportedError, match="CentralStorageStrategy, where overlap has not been shown"):
        fit.overlap(model)


def test_a_keras_that_is_not_known_is_refused(monkeypatch):
    def pythonify_logs(logs):
        return dict(logs)

    monkeypatch.setattr("keras.src.utils.python_utils.pythonify_logs", pythonify_logs)
    nothing_fits(monkeypatch)
    model = dense_net()
    with pytest.raises(UnsupportedError, match=r"pythonify_logs .*Found: a version .*Call model\.fit without tfopt"):
        fit.overlap(model)
    assert names(model) == names(dense_net())


TWO_REPLICAS = """
import keras
import tensorflow as tf
import tfopt.fit  # must leave TensorFlow's devices open to what comes next
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from fitting import Pair, Steps, Trace, X, Y, compiled, dataset

def make():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        return compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.3), keras.layers.Dense(4)]))

def train(model):
    history = model.fit(X, Y, batch_size=16, epochs=2, validation_data=dataset(batch=20), verbose=0).history
    each = [part.numpy().tobytes() for weight in model.weights for part in weight.value.values]
    return history, each, model.predict(X, verbose=0).tobytes()

pair = Pair(make)
pair.train(train)
model = pair.overlapped
print("replicas:", model.distribute_strategy.num_replicas_in_sync, type(model.train_function).__name__)
"""


@pytest.mark.slow
def test_two_replicas():
    """In a process of its own: logical devices are made before TensorFlow starts."""
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": os.pathsep.join(folders)}
    run = subprocess.run([sys.executable, "-c", TWO_REPLICAS], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert "replicas: 2 OverlappedStep" in run.stdout
