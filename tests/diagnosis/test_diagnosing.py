"""What `diagnose` tests, that it leaves everything as it was, and what it refuses."""

import json
import os
import random
import subprocess
import sys
import time
from dataclasses import replace

import diagnoses
import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.diagnosis import diagnose_fit
from tfopt.diagnosis.diagnosing import _without_communication, experiments
from tfopt.diagnosis.tuning import Tuning
from tfopt.errors import PipelineError, TfoptError, UnsupportedError
from tfopt.pipelines import plan_pipeline

STEPS = 5
X = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
Y = X[:, :1] * 2


def made(**compile_arguments):
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], **compile_arguments)
    return model


def state(model):
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [variable.numpy() for variable in variables]


def same(before, after):
    return len(before) == len(after) and all(
        np.array_equal(one, other) for one, other in zip(before, after, strict=True)
    )


class Counting(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(batch)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A diagnosis of a model that was trained before, and what was there before it."""
    folder = tmp_path_factory.mktemp("diagnosis")
    model, counting = made(), Counting()
    checkpoint = keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True)
    waiting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.01))
    model.fit(X, Y, verbose=0)
    before = state(model)
    functions = model.train_function, model.test_function, model.history
    random.seed(1), np.random.seed(1)
    draws = random.getstate()[1], np.random.get_state()[1]
    arguments = {
        "x": X,
        "y": Y,
        "batch_size": 16,
        "epochs": 2,
        "callbacks": [counting, checkpoint, waiting],
        "validation_data": (X, Y),
    }
    diagnosis = diagnose_fit(model, arguments, STEPS)
    return {
        "diagnosis": diagnosis,
        "before": before,
        "after": state(model),
        "functions": (functions, (model.train_function, model.test_function, model.history)),
        "draws": (draws, (random.getstate()[1], np.random.get_state()[1])),
        "counting": counting,
        "checkpoint": checkpoint,
        "folder": folder,
    }


@pytest.mark.slow
def test_the_model_comes_back_bit_for_bit(done):
    assert same(done["before"], done["after"])
    assert all(one is other for one, other in zip(*done["functions"], strict=True))
    assert done["draws"][0][0] == done["draws"][1][0]
    assert np.array_equal(done["draws"][0][1], done["draws"][1][1])


@pytest.mark.slow
def test_callbacks_come_back_and_write_elsewhere(done):
    assert done["counting"].seen == []
    assert "on_epoch_end" not in vars(done["counting"])
    assert done["checkpoint"].filepath == str(done["folder"] / "best.keras")
    assert list(done["folder"].iterdir()) == []


@pytest.mark.slow
def test_each_cause_is_tested_or_the_reason_is_given(done):
    diagnosis = done["diagnosis"]
    tested = {cause.name for cause in diagnosis.causes}
    assert tested >= {
        "input",
        "callback Counting",
        "progress bar",
        "fit waits for each step",
        "XLA is off",
        "small batch",
        "validation",
        "callback ModelCheckpoint, between epochs",
        "callback LambdaCallback, between epochs",
    }
    assert {each.name for each in diagnosis.not_tested} >= {"float32", "copying to the GPU", "communication"}


@pytest.mark.slow
def test_a_step_has_its_share_of_the_pauses(done):
    diagnosis = done["diagnosis"]
    validation = next(cause for cause in diagnosis.causes if cause.name == "validation")
    assert 0 < validation.cost_ms < diagnosis.now.median_ms
    assert validation.share == validation.cost_ms / diagnosis.now.median_ms
    assert diagnosis.now.examples_per_step == 16
    assert diagnosis.floor_ms < diagnosis.now.median_ms


@pytest.mark.slow
def test_the_same_training_as_without_a_diagnosis():
    model = made()
    model.fit(X, Y, verbose=0, epochs=2)
    other = made()
    tfopt.diagnose(other, (X, Y), steps=STEPS)
    other.fit(X, Y, verbose=0, epochs=2)
    assert same(state(model), state(other))


class Stops(keras.callbacks.Callback):
    def __init__(self, error, after):
        super().__init__()
        self.error, self.left = error, [after]

    def on_train_batch_end(self, batch, logs=None):
        self.left[0] -= 1
        if self.left[0] == 0:
            raise self.error


@pytest.mark.slow
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no disk")], ids=["interrupt", "error"])
def test_an_error_leaves_everything_as_it_was(error):
    model = made()
    model.fit(X, Y, verbose=0)
    before, function = state(model), model.train_function

    callback = Stops(error, after=4)
    with pytest.raises(type(error)):
        tfopt.diagnose(model, (X, Y), [callback], steps=STEPS)
    assert same(before, state(model))
    assert model.train_function is function
    assert vars(callback).get("on_epoch_end") is None


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, number):
        return X[16 * number : 16 * number + 16], Y[16 * number : 16 * number + 16]


def endless():
    while True:
        yield X[:16], Y[:16]


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48).batch(16),
        lambda: plan_pipeline((X, Y), batch_size=16),
        Squares,
        lambda: Squares(workers=2),
        endless,
    ],
    ids=["dataset", "plan", "PyDataset", "workers", "generator"],
)
def test_whatever_fit_takes(data):
    model = made()
    model.fit(X, Y, verbose=0)
    before = state(model)
    diagnosis = tfopt.diagnose(model, data(), steps=STEPS)
    assert diagnosis.now.examples_per_step == 16
    assert same(before, state(model))


ON_TWO_REPLICAS = """
import json, keras, numpy as np, tensorflow as tf, tfopt
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

@keras.saving.register_keras_serializable("user")
class Own(keras.layers.Layer):
    def call(self, x):
        return x

class NoConfig(keras.Model):
    def __init__(self, unit):
        super().__init__()
        self.unit = unit

    def call(self, x):
        return self.unit(x)

def diagnosed(copied):
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        one = keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((8,)), Own(), one]) if copied else NoConfig(one)
        model.compile("adam", "mse")
    x = np.ones((48, 8), "float32")
    dataset = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(16, drop_remainder=True)
    return tfopt.diagnose(model, dataset, steps=5).to_dict()

print(json.dumps([diagnosed(copied=True), diagnosed(copied=False)]))
"""


@pytest.mark.slow
def test_under_a_strategy():
    ran = subprocess.run(
        [sys.executable, "-c", ON_TWO_REPLICAS],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        check=True,
    )
    said = {}
    for copied, found in zip(("copied", "not copied"), json.loads(ran.stdout.splitlines()[-1]), strict=True):
        assert found["now"]["examples_per_step"] == 16
        assert "small batch" in {each["name"] for each in found["not_tested"]}
        (communication,) = (cause for cause in found["causes"] if cause["name"] == "communication")
        said[copied] = communication["evidence"]
    assert "One replica alone with its share of the batch" in said["copied"]
    assert "The all-reduce of" in said["not copied"]
    assert all("of gradients over 2 replicas" in each for each in said.values())


def test_the_floor_has_no_communication():
    def floor(cost_ms):
        causes = [diagnoses.cause("communication", cost_ms), diagnoses.cause("input", 20)]
        return _without_communication(diagnoses.times(50), causes).median_ms

    assert floor(20) == 30
    assert floor(1) == 50  # too little to count
    assert floor(60) == pytest.approx(5)


def test_a_sample_that_took_less_than_communication_keeps_a_tenth():
    uneven = replace(diagnoses.times(50), repeats_ms=((50.0, 10.0), (60.0,)))
    left = _without_communication(uneven, [diagnoses.cause("communication", 30)])
    assert left.repeats_ms == ((20.0, 1.0), (30.0,))


def test_changes_that_fail_together_leave_the_floor_as_it_was():
    with experiments(made(), {"x": X, "y": Y}, STEPS) as its:
        its.interleave = lambda arms: {}
        floor, together = its._without_all(set(), {"now": diagnoses.times(9), "the step alone": diagnoses.times(5)})
    assert (floor.median_ms, together) == (5, None)
    tried = {"applied": (), "refused": (), "tried": ("XLA is off",), "comparison": None, "code": ""}
    said = str(Tuning(model=None, data=None, diagnosis=diagnoses.diagnosis(), **tried))
    assert said == 'Nothing was changed: what takes away "XLA is off" failed.'


@pytest.mark.parametrize("error", [TfoptError("fit ended after 1"), OSError("one thread only")], ids=["tfopt", "other"])
def test_an_experiment_that_fails_is_listed_and_the_training_as_it_stands_is_not(error):
    def fails(steps):
        raise error

    with experiments(made(), {"x": X, "y": Y}, STEPS) as its:
        times = its.interleave({"now": lambda steps: diagnoses.times(9), "other": fails})
        assert [(one.name, str(error) in one.reason) for one in its._not_tested] == [("other", True)]
        assert list(times) == ["now"]
        with pytest.raises(type(error)):
            its.interleave({"now": fails})


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="compiled"):
        tfopt.diagnose(keras.Sequential([keras.layers.Dense(1)]), (X, Y))
    with pytest.raises(ValueError, match="Expected steps to be an integer of at least 5"):
        tfopt.diagnose(made(), (X, Y), steps=2)
    with pytest.raises(TypeError, match=r"Expected data that model\.fit takes.*Received: int"):
        tfopt.diagnose(made(), 7)
    with pytest.raises(PipelineError, match="at least one batch"):
        tfopt.diagnose(made(), tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).take(0))
    with pytest.raises(UnsupportedError, match="CallbackList"):
        diagnose_fit(made(), {"x": X, "y": Y, "callbacks": keras.callbacks.CallbackList([])})


@pytest.mark.slow
def test_the_slow_stage_of_the_input_is_named():
    def read(row):
        time.sleep(0.005)
        return row

    def load(x, y):
        return tf.ensure_shape(tf.numpy_function(read, [x], tf.float32), (8,)), y

    data = tf.data.Dataset.from_tensor_slices((X, Y)).map(load).batch(8)
    (cause,) = (cause for cause in tfopt.diagnose(made(), data, steps=STEPS).causes if cause.name == "input")
    assert "profile_pipeline: map (load) limits it" in cause.evidence


@pytest.mark.slow
def test_causes_are_also_taken_away_together():
    """An input and a callback that sleep: fit may prefetch, so that a step takes the longer of both, or their sum."""

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.03)

    class Slower(Slow):
        def on_train_batch_begin(self, batch, logs=None):
            time.sleep(0.06)

    found = tfopt.diagnose(made(), (X, Y), [Slow(), Slower()], steps=STEPS)
    assert {"callback Slow", "callback Slower"} <= {cause.name for cause in found.worth_changing}
    slept_ms = 30 + 30 + 60
    # Without them a step takes what the rest does: at least the computation.
    without_ms = found.now.median_ms / found.together.ratio
    assert found.floor_ms / 2 < without_ms < found.now.median_ms - 0.8 * slept_ms
