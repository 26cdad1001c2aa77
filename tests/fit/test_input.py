"""Where the batches come from: copied ahead, made by a pipeline's device stage, and counted right when they end."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from fitting import Pair, X, Y, dataset, dense_net

from tfopt import fit
from tfopt.errors import DeviceMemoryError, PipelineError, UnsupportedError
from tfopt.fit import overlapping
from tfopt.measure import preserved
from tfopt.pipelines import build_pipeline, plan_pipeline
from tfopt.pipelines.device import device_stage, placing
from tfopt.pipelines.device.copying import CopiedAhead, copy_ahead
from tfopt.warn import forget_warnings

ROOT = Path(__file__).parents[2]
SILENT = {"verbose": 0, "shuffle": False}


@pytest.fixture(scope="module")
def pair():
    return Pair()


@pytest.fixture
def copies(monkeypatch):
    """A device to copy to, and what was copied to it."""
    made = []

    def copy(data, device, steps):
        made.append(copy_ahead(data, device, steps))
        return made[-1]

    monkeypatch.setattr(overlapping, "choose_device", lambda asked, spec: ("/cpu:0", "played"))
    monkeypatch.setattr(overlapping, "copy_ahead", copy)
    return made


def steps(model):
    return int(model.optimizer.iterations)


@pytest.mark.slow
def test_data_of_unknown_length_counts_its_steps_right():
    """D19: stock fit runs, when the data ends, what of the step does not depend on them."""
    counts = []
    for known in (True, False):
        data = dataset() if known else dataset().filter(lambda *_: True)
        for model in (dense_net(), fit.overlap(dense_net())):
            keras.utils.set_random_seed(3)
            if known:
                model.fit(data, epochs=6, **SILENT)
            else:
                with pytest.warns(UserWarning, match="ran out of data"):
                    model.fit(data, epochs=6, **SILENT)
            counts.append(steps(model))
    assert counts[:2] + counts[3:] == [18, 18, 18]
    assert 18 < counts[2] <= 24  # a GPU may see the end of the data before it counts


def test_data_of_unknown_length_train_as_data_of_known_length(pair):
    def train(model):
        data = dataset().filter(lambda *_: True) if model is pair.overlapped else dataset()
        if model is pair.stock:
            return model.fit(data, epochs=3, **SILENT).history
        with pytest.warns(UserWarning, match="ran out of data"):
            return model.fit(data, epochs=3, **SILENT).history

    pair.train(train)


@pytest.mark.parametrize(("overlapped", "counts"), [(False, (2, 3)), (True, (2,))])
def test_a_pipeline_that_fails_leaves_a_whole_number_of_steps(pair, overlapped, counts):
    """Stock fit counts the step whose batch never came, unless it sees that first, as it may on a GPU."""
    failing = tf.data.Dataset.range(40).map(lambda i: (X[0] / tf.cast(tf.maximum(20 - i, 0), tf.float32), 0))
    failing = failing.map(lambda x, y: (tf.debugging.check_numerics(x, "bad row"), y)).batch(8)
    model = pair.models[overlapped]
    model.optimizer.iterations.assign(0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad row"):
        model.fit(failing, **SILENT)
    counted = steps(model)
    assert counted in counts
    model.fit(dataset(), **SILENT)
    assert steps(model) == counted + 3


@pytest.mark.slow
def test_every_kind_of_input_is_copied_ahead(pair, copies):
    def train(model):
        copies.clear()
        fitted = [model.fit(X, Y, batch_size=16, validation_data=dataset(), epochs=2, verbose=0).history]
        fitted.append(model.fit(dataset(), validation_data=(X, Y), epochs=2, **SILENT).history)
        predicted = model.predict(dataset(), verbose=0).tobytes()
        counts.append(len(copies))
        return fitted, model.evaluate(dataset(), verbose=0), predicted

    counts = []
    pair.train(train)
    assert counts == [0, 5]  # once for a fit, however many epochs it has


def test_a_strategy_copies_what_is_predicted_itself(copies, monkeypatch):
    device = {True: None, False: "/cpu:0"}  # as choose_device
    monkeypatch.setattr(overlapping, "choose_device", lambda asked, spec: (device[tf.distribute.has_strategy()], ""))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope():
        model = fit.overlap(dense_net())
    assert model.predict(dataset(), verbose=0).shape == (40, 4)
    assert copies == []
    fit.overlap(dense_net()).predict(dataset(), verbose=0)
    assert len(copies) == 1


def test_what_is_on_the_device_already_is_not_copied_again(pair, copies):
    ready = build_pipeline((X, Y), batch_size=8, training=False, device="/cpu:0")
    pair.overlapped.fit(ready, validation_data=ready, epochs=2, **SILENT)
    assert copies == []
    again = ready.prefetch(2).with_options(tf.data.Options())
    assert overlapping.for_predict(again) is again
    overlapping.for_predict(again.map(lambda x, y: (2 * x, y)))
    assert len(copies) == 1


@pytest.mark.no_gpu
def test_nothing_is_copied_without_a_gpu(pair, monkeypatch):
    monkeypatch.setattr(overlapping, "copy_ahead", lambda *_: pytest.fail("copied"))
    pair.overlapped.fit(X, Y, verbose=0)


def staged(**options):
    return build_pipeline((X, Y), batch_size=8, cache="device", device="/cpu:0", **options)


@pytest.mark.slow
def test_a_device_stage_trains_as_the_same_batches_do(pair):
    def train(model):
        data = staged(training=False) if model is pair.overlapped else dataset(batch=8)
        fitted = model.fit(data, validation_data=data, epochs=3, **SILENT)
        return fitted.history, model.evaluate(data, verbose=0)

    pair.train(train)


def test_a_device_stage_goes_on_where_the_epoch_before_ended(pair):
    def train(model):
        data = staged(training=False) if model is pair.overlapped else dataset(batch=8)
        return model.fit(data, steps_per_epoch=2, epochs=2, **SILENT).history

    pair.train(train)


@pytest.mark.slow
@pytest.mark.parametrize("count", [24, 40])
def test_int32_parts_that_stay_on_the_host_train_the_same(pair, copies, monkeypatch, count):
    monkeypatch.setattr(overlapping, "is_gpu", lambda device: True)
    data = dataset(X[:count], Y[:count].astype("int32"))

    def train(model):
        ready = copy_ahead(data, "/cpu:0", None) if model is pair.overlapped else data
        fitted = [model.fit(given, validation_data=data, epochs=2, **SILENT).history for given in (data, ready)]
        return fitted, model.evaluate(data, verbose=0)

    pair.train(train)
    for given in (data, copy_ahead(data, "/cpu:0", None)):
        assert isinstance(overlapping.ahead(given, jit=False), overlapping.DeviceStageBatches)
        assert isinstance(overlapping.ahead(given, jit=True), CopiedAhead)


ON_ANOTHER_DEVICE = """
import numpy as np, tensorflow as tf
(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
from tfopt.fit import overlapping
from tfopt.pipelines import build_pipeline

overlapping.choose_device = lambda asked, spec: ("/cpu:1", "played")
overlapping.is_gpu = lambda device: True

def devices(dataset, jit):
    (batch,) = overlapping.ahead(dataset, jit=jit)
    return {name: part.device[-5:] for name, part in batch.items()}

rows = {"image": np.zeros((4, 3), "uint8"), "wide": np.arange(4), "label": np.arange(4, dtype="int32")}
host = tf.data.Dataset.from_tensor_slices(rows).batch(4)
for dataset in (host, build_pipeline(rows, batch_size=4, device="CPU:1"), build_pipeline(rows, batch_size=4)):
    assert devices(dataset, True) == {"image": "CPU:1", "wide": "CPU:1", "label": "CPU:1"}
    assert devices(dataset, False) == {"image": "CPU:1", "wide": "CPU:1", "label": "CPU:0"}
tokens = host.map(lambda batch: {"label": batch["label"]})
assert devices(tokens, False) == {"label": "CPU:0"}
assert devices(tokens, True) == {"label": "CPU:1"}
"""


@pytest.mark.slow
def test_int32_parts_lie_on_the_host_unless_the_step_is_compiled():
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", ON_ANOTHER_DEVICE]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_without_room_on_the_device_the_host_makes_the_batches(pair, monkeypatch, caplog):
    """The memory was there when cache="auto" planned."""

    def full(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "OOM")

    forget_warnings()
    monkeypatch.setattr(placing, "is_gpu", lambda device: device is not None)
    monkeypatch.setattr(placing, "free_bytes", lambda device: 2**30)
    plan = plan_pipeline((X, Y), batch_size=8, device="CPU:0", training=False)
    assert plan.to_dict()["on_device"]
    monkeypatch.setattr(device_stage, "_zeros", full)

    def train(model):
        data = plan.build() if model is pair.overlapped else dataset(batch=8)
        fitted = model.fit(data, validation_data=data, epochs=2, **SILENT)
        return fitted.history, model.evaluate(data, verbose=0)

    pair.train(train)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("Expected room for 1.6 KiB of examples on CPU:0. Found that its memory is taken")
    assert "The host makes the batches now" in warning
    with pytest.raises(DeviceMemoryError, match="Expected room"):
        pair.overlapped.fit(staged(), **SILENT)


def test_a_device_stage_in_the_order_of_its_seed(pair):
    histories = []
    for seed in (5, 5, 6):
        with preserved(pair.overlapped):
            histories.append(pair.overlapped.fit(staged(seed=seed), epochs=2, **SILENT).history)
    assert histories[0] == histories[1] != histories[2]


def test_a_device_stage_needs_overlap(pair):
    with pytest.raises((PipelineError, tf.errors.InvalidArgumentError), match=r"tfopt\.fit\.overlap"):
        pair.stock.fit(staged(), **SILENT)
    with pytest.raises(UnsupportedError, match="without a device stage"):
        pair.overlapped.predict(staged(), verbose=0)


def test_predict_of_arrays_is_as_ever(pair):
    found = pair.overlapped.predict(x=X, batch_size=len(X), verbose=0)
    assert np.array_equal(found, pair.overlapped.predict_on_batch(X))
