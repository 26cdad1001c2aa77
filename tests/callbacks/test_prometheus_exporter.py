import gc
import os
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import keras
import numpy as np
import pytest
from clock import Clock
from fake_nvml import FakeGpu
from prometheus_client.parser import text_string_to_metric_families
from throughput import Clock as StepClock
from watched_fit import Forks, Interrupts, fit, gpus, net, shared_net, threads, told

from tfopt import warn
from tfopt.callbacks import ThroughputLogger, UtilizationLogger, prometheus_exporter
from tfopt.callbacks.prometheus_exporter import PrometheusExporter
from tfopt.callbacks.shared.progress import Progress
from tfopt.errors import UnsupportedError
from tfopt.hardware import GpuSample

TICK = 0.01


@pytest.fixture(autouse=True)
def _forgotten_warnings(monkeypatch):
    warn.forget_warnings()
    monkeypatch.setattr(prometheus_exporter, "_WAIT_SECONDS", 20.0)  # tests read the file right after fit


def parsed(text):
    """Each sample's value, by name and labels, without those that all have."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert (len(sample.labels.pop("run")), sample.labels.pop("rank")) == (8, "0")
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def scraped(exporter):
    with urllib.request.urlopen(exporter.url, timeout=10) as answer:
        return parsed(answer.read().decode())


class Scrapes(keras.callbacks.Callback):
    """Asks as Prometheus does, in the middle of fit, until a sample is there."""

    def __init__(self, exporter, awaited=("tfopt_gpu_utilization_ratio", "0", "GPU-a")):
        super().__init__()
        self.exporter, self.awaited, self.found = exporter, awaited, []

    def on_train_batch_end(self, step, logs=None):
        if step == 2:
            self.found.append(scraped(self.exporter))
            while self.awaited not in self.found[-1]:
                time.sleep(0.005)
                self.found[-1] = scraped(self.exporter)


@pytest.fixture
def driven(tmp_path, set_clock):
    """Makes exporters to a file that run without fit: the test hands them their readings."""
    begun = []

    def drive(clock=None):
        set_clock(clock or Clock(), PrometheusExporter, Progress)
        exporter = PrometheusExporter(tmp_path / "driven.prom", interval_seconds=15)
        exporter.set_model(shared_net())
        exporter.on_train_begin()
        exporter.on_epoch_begin(0)
        begun.append(exporter)
        return exporter

    yield drive
    for exporter in begun:
        exporter.on_train_end()


def written(exporter):
    """What the file says, once its thread has done what it was asked to."""
    done = threading.Event()
    exporter._outlet._background._function, write = (
        lambda item: (write(item), done.set()),
        (exporter._outlet._background._function),
    )
    exporter._outlet._background.put("now")
    assert done.wait(10)
    exporter._outlet._background._function = write
    return parsed(exporter._textfile.read_text())


def test_a_scrape_while_fit_runs(fake_nvml):
    fake_nvml.gpus += [FakeGpu(utilization=90, uuid="GPU-a", reasons=0x4), FakeGpu(utilization=70, uuid="GPU-b", bus=2)]
    exporter = PrometheusExporter(port=0)
    scrapes = Scrapes(exporter)
    fit(exporter, UtilizationLogger(interval_seconds=TICK), scrapes, epochs=2, model=net())
    first, second = scrapes.found
    assert exporter.url is None
    assert first["tfopt_gpu_utilization_ratio", "1", "GPU-b"] == pytest.approx(0.7)
    assert first["tfopt_gpu_memory_used_bytes", "0", "GPU-a"] == 1024.0 * 2**20
    assert first["tfopt_gpu_energy_joules_total", "0", "GPU-a"] == 123_456.789
    assert first["tfopt_throttled", "0", "power_cap", "GPU-a"] == 1.0
    assert first["tfopt_host_memory_used_bytes",] > 0
    assert (first["tfopt_fit_running",], first["tfopt_steps_total",], first["tfopt_epochs_total",]) == (1.0, 3.0, 0.0)
    assert (second["tfopt_steps_total",], second["tfopt_epochs_total",]) == (7.0, 1.0)
    assert second["tfopt_log", "loss"] > 0


def test_the_pace_of_the_training_but_not_during_validation(fake_nvml):
    class Looks(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            self.validating = scraped(exporter)

        def on_epoch_end(self, epoch, logs=None):
            self.after = scraped(exporter)

    exporter, looks = PrometheusExporter(port=0), Looks()
    fit(ThroughputLogger(), exporter, looks, epochs=2, validation_split=0.25)
    assert looks.after["tfopt_examples_per_second",] > 0
    assert "tfopt_step" not in {name for name, *_ in looks.after}
    assert ("tfopt_examples_per_second",) not in looks.validating


def test_what_is_unknown_has_no_sample(driven):
    exporter = driven()
    exporter._take_samples(
        (*gpus(90, None, sm_active_percent=float("nan")), GpuSample(0.0, 0.0, host_cpu_percent=None))
    )
    exporter._take_throughput({"step_time_ms": 12.5, "input_wait_percent": 12.5, "mfu_percent": None})
    found = written(exporter)
    assert found["tfopt_gpu_utilization_ratio", "0", "GPU-0"] == 0.9
    assert ("tfopt_gpu_utilization_ratio", "1", "GPU-1") not in found
    assert found["tfopt_input_wait_ratio",] == 0.125
    assert {name for name, *_ in found} == {
        "tfopt_gpu_utilization_ratio",
        "tfopt_input_wait_ratio",
        "tfopt_fit_running",
        "tfopt_seconds_since_step",
        "tfopt_steps_total",
        "tfopt_epochs_total",
    }
    # A GPU that is lost is no longer there.
    exporter._take_samples(gpus(None, None))
    assert not [name for name, *_ in written(exporter) if "gpu" in name]
    exporter._take_samples((GpuSample(0.0, 0.0, host_cpu_percent=42.0),))  # a machine without one
    assert written(exporter)["tfopt_host_cpu_ratio",] == 0.42


def test_logs_are_finite_numbers_under_whatever_name(driven):
    exporter = driven()
    logs = {"loss": 0.5, 'a "b"\n\\': 1, "\ud800": 2, 7: 1.5, "nan": float("nan"), "text": "x", "none": None}
    exporter.on_epoch_end(0, logs)
    found = written(exporter)
    assert {key: value for key, value in found.items() if key[0] == "tfopt_log"} == {
        ("tfopt_log", "loss"): 0.5,
        ("tfopt_log", 'a "b"\n\\'): 1.0,
        ("tfopt_log", "\ufffd"): 2.0,
        ("tfopt_log", "7"): 1.5,
    }
    assert found["tfopt_epochs_total",] == 1.0


def test_evaluate_and_predict_without_fit(tmp_path):
    exporter, inputs = PrometheusExporter(tmp_path / "x.prom"), shared_net().inputs[0].shape[1:]
    x = np.zeros((4, *inputs), "float32")
    shared_net().predict(x, verbose=0, callbacks=[exporter])
    shared_net().evaluate(x, np.zeros((4, 1), "float32"), verbose=0, callbacks=[exporter])
    assert not list(tmp_path.iterdir())


def test_a_loop_that_tells_of_no_epochs(tmp_path):
    exporter = PrometheusExporter(tmp_path / "loop.prom")
    exporter.set_model(shared_net())
    exporter.on_train_begin()
    exporter.on_train_batch_end(0)
    exporter.on_train_end()
    assert parsed((tmp_path / "loop.prom").read_text())["tfopt_steps_total",] == 1.0


def test_the_file_is_written_each_interval_and_never_in_part(driven, monkeypatch):
    clock, writes = Clock(), []
    exporter = driven(clock)
    put = exporter._outlet._background.put
    monkeypatch.setattr(exporter._outlet._background, "put", lambda item: (writes.append(clock.now), put(item)))
    for _ in range(40):
        clock.now += 1
        exporter._take_samples(gpus(90))
    assert writes == [1015.0, 1030.0]
    exporter.on_train_end()
    assert os.listdir(exporter._textfile.parent) == ["driven.prom"]  # and nothing that was to become it


def test_what_stays_after_fit(tmp_path, fake_nvml):
    fake_nvml.gpus.append(FakeGpu())
    file = tmp_path / "folder" / "fit.prom"
    fit(PrometheusExporter(file), UtilizationLogger(interval_seconds=TICK), epochs=2)
    found = parsed(file.read_text())
    assert (found["tfopt_fit_running",], found["tfopt_steps_total",], found["tfopt_epochs_total",]) == (0.0, 8.0, 2.0)
    assert found["tfopt_log", "loss"] > 0
    names = {"tfopt_fit_running", "tfopt_steps_total", "tfopt_epochs_total", "tfopt_log"}
    assert {name for name, *_ in found if not name.startswith("tfopt_step_time_seconds_")} == names
    assert os.listdir(file.parent) == ["fit.prom"]
    assert oct(file.stat().st_mode & 0o444) == "0o444"  # node_exporter is another user


def test_the_histogram_of_all_step_times_stays_after_fit(tmp_path, set_clock):
    """By a clock on which each step takes a second, and the first one, which does not count, a minute."""
    set_clock(StepClock(0.0, 60.0), ThroughputLogger)
    seconds = ThroughputLogger()
    fit(seconds, PrometheusExporter(tmp_path / "fit.prom"), model=net(), epochs=2)
    found = parsed((tmp_path / "fit.prom").read_text())
    assert (found["tfopt_step_time_seconds_count",], found["tfopt_step_time_seconds_sum",]) == (7.0, 7.0)
    buckets = {name[1]: value for name, value in found.items() if name[0] == "tfopt_step_time_seconds_bucket"}
    assert (buckets["0.5"], buckets["1.0"], buckets["100.0"], buckets["+Inf"]) == (0.0, 7.0, 7.0, 7.0)


def test_a_file_that_cannot_be_written_is_reported_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    exporter = PrometheusExporter(tmp_path / "file" / "fit.prom", interval_seconds=1e-9)
    assert len(fit(exporter, epochs=2).epoch) == 2
    (text,) = [text for text in told(caplog) if "fit.prom" in text]
    assert text.startswith(f"Expected to write {tmp_path}/file/fit.prom for Prometheus. Found: [Errno ")
    assert text.endswith("Free the disk or choose another folder.")


def test_a_port_that_is_taken_is_reported_once(caplog):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        exporter = PrometheusExporter(port=port)
        for _ in range(2):
            assert len(fit(exporter).epoch) == 1
    (text,) = [text for text in told(caplog) if "listen" in text]
    assert text.startswith(f"Expected to listen on 127.0.0.1:{port} for Prometheus. Found: ")
    assert text.endswith("Choose another port, or 0 for any free one.")


def test_an_address_that_is_not_there(caplog):
    assert len(fit(PrometheusExporter(port=0, host="no.such.host.invalid")).epoch) == 1
    assert len([text for text in told(caplog) if "no.such.host" in text]) == 1
    assert len(fit(PrometheusExporter(port=0, host="a" * 80)).epoch) == 1  # more than a label of a name may have
    assert len([text for text in told(caplog) if "aaaa" in text]) == 1


def test_clients_that_never_ask_or_read_leave_no_thread(capfd):
    class Connects(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs |= {f"key {number} {'x' * 100}": 1.0 for number in range(10_000)}  # more than a socket's buffers hold

        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                address = exporter._outlet._server.server_address
                clients.extend(socket.create_connection(address) for _ in range(3))
                clients[1].sendall(b"GET /metrics HTTP/1.1\r\n")
                clients[2].sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                while sum("process_request" in name for name in map(str, threading.enumerate())) < 3:
                    time.sleep(0.005)

    clients, exporter = [], PrometheusExporter(port=0)
    fit(Connects(), exporter, epochs=2)
    for thread in threading.enumerate():
        if "process_request" in thread.name:
            thread.join(10)
            assert not thread.is_alive()
    for client in clients:
        client.close()
    assert "Traceback" not in capfd.readouterr().err


def test_only_this_machine_can_connect_unless_told_otherwise():
    class Looks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            addresses.append(exporter._outlet._server.server_address[0])

    addresses = []
    for exporter in (PrometheusExporter(port=0), PrometheusExporter(port=0, host="0.0.0.0")):
        fit(exporter, Looks())
    assert addresses == ["127.0.0.1", "0.0.0.0"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.slow
def test_after_an_interrupted_fit_port_and_file_end_by_themselves(tmp_path):
    port = free_port()
    on_port, on_file = PrometheusExporter(port=port), PrometheusExporter(tmp_path / "fit.prom")
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fit(on_port, on_file, Interrupts())
        gc.collect()
        assert not threads("sampler", "textfile", "prometheus-closing")
        assert parsed((tmp_path / "fit.prom").read_text())["tfopt_fit_running",] == 0.0
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10)
    scrapes = Scrapes(on_port, ("tfopt_host_memory_used_bytes",))
    fit(on_port, scrapes)
    assert scrapes.found


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_neither_hangs_nor_keeps_the_port(tmp_path):
    port, holds = free_port(), os.pipe()
    exporter = PrometheusExporter(port=port)

    class Forked(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 1 and not os.fork():
                os.close(holds[1])
                os.read(holds[0], 1)  # until the test has ended
                os._exit(0)

    on_file = PrometheusExporter(tmp_path / "fit.prom")

    def in_the_child():
        exporter.on_train_end()
        on_file.on_train_end()
        assert not threads("prometheus-closing")  # which would wait for a thread that the child does not have

    fit(exporter, on_file, Forks(in_the_child), Forked(), Answers(exporter))
    again = PrometheusExporter(port=port)
    fit(again, Answers(again))  # the port is free again
    os.close(holds[1])
    os.wait()


class Answers(keras.callbacks.Callback):
    """Fails unless the port answers to the end."""

    def __init__(self, exporter):
        super().__init__()
        self.exporter = exporter

    def on_epoch_end(self, epoch, logs=None):
        assert scraped(self.exporter)["tfopt_fit_running",] == 1.0


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UnsupportedError, match=r"Run: pip install 'tfopt\[prometheus\]'"):
        PrometheusExporter(port=0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "Expected a textfile or a port. Received: textfile=None, port=None"),
        ({"textfile": "a.prom", "port": 1}, ValueError, "For both, use two exporters"),
        ({"textfile": "metrics.txt"}, ValueError, r'ends in ".prom". Received: \'metrics.txt\'. node_exporter'),
        ({"port": 65536}, ValueError, "Expected port to be from 0 to 65535"),
        ({"port": 0, "host": ""}, TypeError, "Expected host to be an address. Received: ''"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        PrometheusExporter(**arguments)


def test_fit_ends_where_no_thread_can_be_started_to_close_the_port(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    outlets = []

    class Full(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            outlets.append(exporter._outlet)
            monkeypatch.setattr(threading.Thread, "start", start)

    exporter = PrometheusExporter(port=0)
    assert fit(exporter, Full()).history["loss"]
    assert exporter.url is None
    monkeypatch.undo()
    outlets[0]._close()


def test_the_pace_ages_out_while_no_step_ends(set_clock):
    clock = Clock()
    set_clock(clock, Progress)
    exporter = PrometheusExporter(port=0)
    exporter.set_model(shared_net())
    exporter.on_train_begin()

    def after(seconds):
        clock.now += seconds
        found = scraped(exporter)
        return found.get(("tfopt_examples_per_second",)), found[("tfopt_seconds_since_step",)]

    assert after(30) == (None, 30)  # the first step
    exporter.on_train_batch_end(0)
    exporter._take_throughput({"examples_per_second": 64.0, "step_time_p99_ms": 900.0})
    assert [after(9), after(1)] == [(64, 9), (None, 10)]
    exporter.on_train_batch_end(1)
    exporter._take_throughput({"examples_per_second": 1.6, "step_time_p99_ms": 20_000.0})
    assert [after(59), after(1)] == [(1.6, 59), (None, 60)]
    exporter.on_test_begin()
    exporter.on_test_batch_begin(0)
    assert after(3) == (None, 3)
    exporter.on_train_end()
