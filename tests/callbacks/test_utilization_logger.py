import copy
import csv
import gc
import json
import pickle
import threading

import keras
import pynvml
import pytest
import tensorflow as tf
from fake_nvml import FIELD_FUNCTIONS, FakeGpu
from models import assert_same_state, batch, small_net, state

from tfopt.callbacks import UtilizationLogger

INTERVAL = 0.01


class Slow(keras.callbacks.Callback):
    """Holds each epoch until the sampler has had its turn, or for good if it never has."""

    def __init__(self, logger, samples=3):
        super().__init__()
        self.logger = logger
        self.taken = threading.Semaphore(0)
        self.samples = samples
        take = logger._take

        def counted(rows):
            take(rows)
            self.taken.release()

        logger._take = counted

    def on_epoch_begin(self, epoch, logs=None):
        while epoch and self.taken.acquire(blocking=False):
            pass  # samples of the epoch before

    def on_train_batch_end(self, step, logs=None):
        if step == 0:
            for _ in range(self.samples):
                self.taken.acquire()


def dataset():
    return tf.data.Dataset.from_tensor_slices(batch(16)).batch(8)


def fit(logger, *others, epochs=2, model=None):
    model = model or small_net()
    return model.fit(dataset(), epochs=epochs, verbose=0, shuffle=False, callbacks=[logger, *others]).history


def test_epoch_means_and_rows(tmp_path, fake_nvml):
    fake_nvml.gpus += [
        FakeGpu(uuid="GPU-a", utilization=90, power_milliwatts=600_000),
        FakeGpu(uuid="GPU-b", bus=2, utilization=70, power_milliwatts=400_000),
    ]
    logger = UtilizationLogger(tmp_path, INTERVAL)
    history = fit(logger, Slow(logger))
    assert history["gpu_utilization_percent"] == [80.0, 80.0]
    assert history["gpu_power_watts"] == [500.0, 500.0]
    assert history["gpu_memory_used_mib"] == [1024.0, 1024.0]
    assert history["host_memory_used_mib"][0] > 0
    with open(tmp_path / "utilization.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(row["index"], row["uuid"], row["gpu_utilization_percent"]) for row in rows} == {
        ("0", "GPU-a", "90"),
        ("1", "GPU-b", "70"),
    }
    assert len(rows) >= 2 * 3 * 2  # epochs, samples in each, GPUs
    objects = [json.loads(line) for line in (tmp_path / "utilization.jsonl").read_text().splitlines()]
    assert [row["uuid"] for row in objects] == [row["uuid"] for row in rows]


@pytest.mark.parametrize("field", sorted(FIELD_FUNCTIONS))
def test_a_field_that_the_device_does_not_give_is_left_out(tmp_path, fake_nvml, field):
    fake_nvml.gpus.append(FakeGpu(unsupported=set(FIELD_FUNCTIONS[field])))
    logger = UtilizationLogger(tmp_path, INTERVAL)
    history = fit(logger, Slow(logger), epochs=1)
    assert field not in history
    first = json.loads((tmp_path / "utilization.jsonl").read_text().splitlines()[0])
    assert first[field] is None
    with open(tmp_path / "utilization.csv", newline="") as file:
        assert next(csv.DictReader(file))[field] == ""


def uninstall(nvml):
    nvml.installed = False


FAULTS = {
    "package missing": uninstall,
    "library missing": lambda nvml: nvml.fail("nvmlInit", pynvml.NVML_ERROR_LIBRARY_NOT_FOUND),
    "driver not loaded": lambda nvml: nvml.fail("nvmlInit", pynvml.NVML_ERROR_DRIVER_NOT_LOADED),
    "version mismatch": lambda nvml: nvml.fail("nvmlInit", pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH),
    "no permission": lambda nvml: nvml.fail("nvmlInit", pynvml.NVML_ERROR_NO_PERMISSION),
    "lost at sample 2": lambda nvml: nvml.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST, at=2),
    "hung from the start": lambda nvml: nvml.hang("nvmlInit"),
    "hung at sample 2": lambda nvml: nvml.hang("nvmlDeviceGetPowerUsage", at=2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fit_goes_on_whatever_the_driver_does(tmp_path, fake_nvml, caplog, fault):
    """A hung call returns at the end of the test only: a fit that waited for it would never end."""
    fake_nvml.gpus.append(FakeGpu())
    FAULTS[fault](fake_nvml)
    plain, logged = small_net(), small_net()
    fit(keras.callbacks.Callback(), model=plain)
    logger = UtilizationLogger(tmp_path, INTERVAL)
    fit(logger, *([] if "hung" in fault else [Slow(logger)]), model=logged)
    assert_same_state(state(plain), state(logged))
    if "hung" not in fault:
        warnings = [record for record in caplog.records if record.name == "tfopt"]
        assert len(warnings) == 1, caplog.text
    assert all(json.loads(line) for line in (tmp_path / "utilization.jsonl").read_text().splitlines())


def test_without_a_gpu_the_host_is_logged(tmp_path, fake_nvml):
    logger = UtilizationLogger(tmp_path, INTERVAL, formats=("jsonl",))
    history = fit(logger, Slow(logger), epochs=1)
    assert not [key for key in history if key.startswith("gpu")]
    assert history["host_memory_used_mib"][0] > 0
    row = json.loads((tmp_path / "utilization.jsonl").read_text().splitlines()[0])
    assert (row["uuid"], row["gpu_utilization_percent"]) == (None, None)
    assert not (tmp_path / "utilization.csv").exists()


class FirstEpochOnly(Slow):
    def on_train_batch_end(self, step, logs=None):
        if self.samples:
            super().on_train_batch_end(step, logs)
            self.samples = 0


def test_a_short_epoch_repeats_the_last_reading(fake_nvml):
    fake_nvml.gpus.append(FakeGpu(utilization=55))
    logger = UtilizationLogger(interval_seconds=3600)
    history = fit(logger, FirstEpochOnly(logger, samples=1), epochs=3)
    assert history["gpu_utilization_percent"] == [55.0] * 3
    assert len(history["host_cpu_percent"]) == 3  # also in the first, in which there was but one sample


def test_means_begin_anew_with_each_epoch(fake_nvml):
    gpu = FakeGpu(utilization=10)
    fake_nvml.gpus.append(gpu)

    class Busier(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            gpu.utilization = 90

    logger = UtilizationLogger(interval_seconds=INTERVAL)
    history = fit(logger, Slow(logger, samples=4), Busier())
    first, second = history["gpu_utilization_percent"]
    assert first == 10.0
    assert second > 50.0  # one sample at most was under way when the load changed


def test_the_next_fit_does_not_begin_with_the_last_ones_readings(fake_nvml):
    fake_nvml.gpus.append(FakeGpu())
    logger = UtilizationLogger(interval_seconds=INTERVAL)
    fit(logger, Slow(logger), epochs=1)
    fake_nvml.gpus.clear()
    assert "gpu_power_watts" not in fit(logger, epochs=1)


def test_it_can_be_copied(tmp_path):
    logger = UtilizationLogger(tmp_path, INTERVAL)
    for copied in (copy.deepcopy(logger), pickle.loads(pickle.dumps(logger))):
        assert len(fit(copied, epochs=1)["loss"]) == 1


def test_after_an_interrupted_fit_sampling_ends_with_the_callback(fake_nvml):
    class Interrupts(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            raise KeyboardInterrupt

    def interrupted():
        with pytest.raises(KeyboardInterrupt):
            fit(UtilizationLogger(interval_seconds=INTERVAL), Interrupts())

    interrupted()
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "tfopt-sampler"]


def test_the_log_folder_vanishes(tmp_path, fake_nvml):
    class Removes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            for file in tmp_path.iterdir():
                file.unlink()
            tmp_path.rmdir()

    logger = UtilizationLogger(tmp_path, INTERVAL)
    assert len(fit(logger, Removes(), epochs=1)["loss"]) == 1


def test_keras_loggers_after_it_see_its_keys(tmp_path, fake_nvml):
    fake_nvml.gpus.append(FakeGpu())
    logger = UtilizationLogger(interval_seconds=INTERVAL)
    fit(logger, Slow(logger), keras.callbacks.CSVLogger(tmp_path / "log.csv"))
    assert "gpu_power_watts" in (tmp_path / "log.csv").read_text()
    with pytest.warns(UserWarning, match="Expected UtilizationLogger before CSVLogger"):
        fit(keras.callbacks.CSVLogger(tmp_path / "log.csv"), UtilizationLogger())


def test_sampling_ends_with_fit_and_starts_with_the_next(tmp_path, fake_nvml):
    def samplers():
        return [thread for thread in threading.enumerate() if thread.name == "tfopt-sampler"]

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError

    logger = UtilizationLogger(tmp_path, INTERVAL)
    slow = Slow(logger)
    fit(logger, slow)
    assert not samplers()
    with pytest.raises(RuntimeError):
        fit(logger, Fails())
    assert len(samplers()) == 1  # an exception ends fit without on_train_end
    fit(logger, slow)
    assert not samplers()


def test_bad_arguments():
    with pytest.raises(ValueError, match="interval_seconds"):
        UtilizationLogger(interval_seconds=0)
    with pytest.raises(ValueError, match=r"Expected a log format: 'csv' or 'jsonl'\. Received: 'xml'"):
        UtilizationLogger(formats=("xml",))
