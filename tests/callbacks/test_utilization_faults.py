"""What may go wrong with the hardware, the driver, the disk and the process while UtilizationLogger runs."""

import os
import threading
import time
import tracemalloc

import pynvml
import pytest
from fake_nvml import FakeGpu
from models import assert_same_state, state
from sampled_fits import INTERVAL, Slow, driven, lines, samplers
from watched_fit import fit, net, told

from tfopt.callbacks.utilization_logger import UtilizationLogger
from tfopt.hardware import GpuSample

FAULTS = {
    "package missing": lambda nvml: setattr(nvml, "installed", False),
    "lost at sample 2": lambda nvml: nvml.fail("nvmlDeviceGetUtilizationRates", pynvml.NVML_ERROR_GPU_IS_LOST, at=2),
    "hung at sample 2": lambda nvml: nvml.hang("nvmlDeviceGetPowerUsage", at=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fit_goes_on_whatever_the_driver_does(tmp_path, fake_nvml, caplog, fault):
    """A hung call returns at the end of the test only: a fit or a row that waited for it would never end."""
    fake_nvml.gpus.append(FakeGpu())
    FAULTS[fault](fake_nvml)
    plain, watched = net(), net()
    fit(model=plain, epochs=2)
    logger = UtilizationLogger(tmp_path, INTERVAL)
    history = fit(logger, Slow(logger), model=watched, epochs=2).history
    assert_same_state(state(plain), state(watched))
    if "hung" not in fault:
        assert len(told(caplog)) == 1, caplog.text
    if "lost" in fault:
        assert "gpu_energy_joules" not in history
    rows = lines(tmp_path / "utilization.jsonl")
    assert len(rows) >= 6
    assert None not in {row["process_memory_mib"] for row in rows}


def test_no_thread_is_to_be_had(tmp_path, fake_nvml, caplog, monkeypatch):
    start = threading.Thread.start

    def refuses(thread):
        if thread.name == "tfopt-sampler":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert len(fit(UtilizationLogger(tmp_path)).epoch) == 1
    assert [text for text in told(caplog) if "can't start new thread" in text], caplog.text


def test_the_next_fit_ends_what_an_interrupted_one_left(tmp_path, fake_nvml):
    logger = UtilizationLogger(tmp_path, INTERVAL)
    logger.on_train_begin()  # and no on_train_end
    assert len(samplers()) == 1
    driven(logger)
    assert not samplers()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_line_does_not_hang(tmp_path, fake_nvml, monkeypatch):
    writing, may_go_on, write = threading.Event(), threading.Event(), os.write

    def slow(handle, data):
        writing.set()
        assert may_go_on.wait(60)
        return write(handle, data)

    logger = UtilizationLogger(tmp_path, interval_seconds=3600)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", slow)
        logger.on_train_begin()
        assert writing.wait(60)
        child = os.fork()
        if child == 0:
            logger.on_train_end()
            os._exit(0)
        deadline = time.monotonic() + 30
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.05)
        if done == (0, 0):
            os.kill(child, 9)
        may_go_on.set()
        logger.on_train_end()
    assert done == (child, 0)
    assert len(lines(tmp_path / "utilization.jsonl")) == 1  # the child took no part


def test_a_week_of_readings_takes_no_memory(fake_nvml):
    logger = UtilizationLogger(interval_seconds=3600)
    slow = Slow(logger)
    logger.set_params({})
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    slow.taken.acquire()  # the sampler's only row: what its threads take is not counted

    def take(times):
        for second in times:
            gpu = {"gpu_power_watts": 500.0 + second % 7, "gpu_energy_joules": 500.0 * second}
            rows = [
                GpuSample(second, second, index, f"GPU-{index}", 97, **gpu, host_cpu_percent=9.0) for index in (0, 1)
            ]
            logger._take(rows)

    take(range(1000))
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    take(range(1000, 11_000))
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    logger.on_train_end()
    assert grown < 10_000
