import dataclasses
import gc
import json
import logging
import threading
import time

import keras
import pytest
import tensorflow as tf
from clock import Clock
from fake_nvml import FakeGpu
from watched_fit import fit, gpus, net, shared_net, threads, told

from tfopt import warn
from tfopt.callbacks import UtilizationLogger
from tfopt.callbacks.shared.progress import Progress
from tfopt.callbacks.utilization_alert import UtilizationAlert
from tfopt.causes.between_gpus import Replicas
from tfopt.hardware import GpuSample

FIRST = (
    "Expected gpu_utilization_percent of GPU:0 to be at least 50. Found 30 on average for 3 s. Likely cause: the "
    "training waits for input 63 % of its time. tfopt.pipelines.profile_pipeline(dataset) names the slow stage; "
    "build_pipeline decodes in parallel, caches and prefetches."
)


@pytest.fixture
def clock(set_clock):
    warn.forget_warnings()
    clock = Clock()
    set_clock(clock, UtilizationAlert, Progress)
    return clock


@pytest.fixture
def driven(clock, fake_nvml):
    """Makes alerts that run without fit: the test hands them their readings, one a second."""
    begun = []

    def drive(*arguments, warm=True, **options):
        alert = UtilizationAlert(*arguments, for_seconds=3, **options)
        alert.set_model(shared_net())
        alert.on_train_begin()
        if warm:
            alert.on_train_batch_end(0)
        begun.append(alert)
        return alert

    yield drive
    for alert in begun:
        alert.on_train_end()


def sample(alert, clock, *readings, step=True):
    for reading in readings:
        if step and alert._progress.stepped_at is not None:
            alert.on_train_batch_end(0)
        alert._take_samples(reading if isinstance(reading, tuple) else gpus(reading))
        clock.now += 1


def test_a_warning_with_the_likely_cause(driven, clock, caplog):
    alert = driven()
    alert._take_throughput({"input_wait_percent": 63.0})
    sample(alert, clock, 45, 30, 30, 15, 10)
    alert.on_train_end()
    assert told(caplog) == [FIRST]
    assert caplog.records[0].levelno == logging.WARNING
    (found,) = alert.alerts
    assert str(found) == found.text == FIRST
    assert (found.metric, found.value, found.gpu_index, found.seconds) == ("gpu_utilization_percent", 30.0, 0, 3.0)
    assert FIRST.endswith(found.cause)
    assert json.loads(json.dumps(found.to_dict())) == {
        "text": FIRST,
        "metric": "gpu_utilization_percent",
        "value": 30.0,
        "gpu_index": 0,
        "seconds": 3.0,
        "cause": found.cause,
    }


def test_the_cause_is_told_from_the_whole_time_beyond_the_bound(driven, clock):
    """The first reading is of before, and the last ones are no better than the others."""
    alert = driven()
    alert._take_throughput({"input_wait_percent": 0.0})
    sample(alert, clock, 90)
    for percent in (80.0, 80.0, 80.0, 0.0):
        alert._take_throughput({"input_wait_percent": percent})
        sample(alert, clock, 10)
    assert "waits for input 60 % of its time" in alert.alerts[0].cause


def test_what_each_gpu_did_is_told_of_it_alone_and_since_its_own_time(driven, clock):
    alert = driven()
    full, empty = ({"gpu_memory_others_mib": mib} for mib in (5000.0, 0.0))
    for percent, others in ((10, full), (90, full), (10, empty), (10, empty), (10, empty), (10, empty)):
        sample(alert, clock, (*gpus(percent, **others), GpuSample(0.0, 0.0, index=1, gpu_memory_others_mib=9000.0)))
    assert "another process" not in alert.alerts[0].cause


def test_what_was_before_the_end_of_the_first_step_is_no_cause(driven, clock):
    alert = driven("step_time_ms", above=100, warm=False)
    sample(alert, clock, *[gpus(0, gpu_memory_others_mib=9000.0)] * 9)
    alert._take_throughput({"step_time_ms": 500.0, "input_wait_percent": 99.0})
    alert.on_train_batch_end(0)
    sample(alert, clock, gpus(0, gpu_memory_others_mib=0.0))
    pace(alert, clock, step_time_ms=120.0, input_wait_percent=0.0)
    assert "another process" not in alert.alerts[0].cause
    assert "waits for input" not in alert.alerts[0].cause


def test_a_low_clock_is_explained_by_the_power_cap_however_low_it_is(driven, clock):
    alert = driven("sm_clock_mhz", below=1900)
    sample(alert, clock, *[gpus(97, sm_clock_mhz=mhz, throttle_reasons=("power_cap",)) for mhz in [1980] + [1800] * 4])
    assert "GPU:0 is throttled by power (power_cap)" in alert.alerts[0].cause


def test_each_gpu_by_itself(driven, clock):
    alert = driven()
    sample(alert, clock, gpus(90, 10), gpus(10, 10), gpus(90, 10), gpus(10, 10), gpus(10, 10), gpus(10, 10))
    assert [(found.gpu_index, found.seconds) for found in alert.alerts] == [(1, 3.0)]
    sample(alert, clock, gpus(10, 10))
    assert [found.gpu_index for found in alert.alerts] == [1, 0]


def test_it_warns_again_only_after_a_recovery(driven, clock, caplog):
    alert = driven()
    sample(alert, clock, *[10] * 9, *[54] * 9, *[10] * 9)  # not by the margin
    sample(alert, clock, *[55] * 3, *[10] * 4, 55, 55, 54, 55, 55, *[10] * 4)  # nor for as long without a break
    assert len(alert.alerts) == 1
    sample(alert, clock, *[55] * 4, *[10] * 4)
    alert.on_train_end()
    assert len(alert.alerts) == len(told(caplog)) == 2  # the same text, and yet twice


@pytest.mark.parametrize(("bound", "back"), [({"below": 95}, 97.5), ({"above": 5}, 4.5), ({"above": 96}, 86.4)])
def test_a_margin_within_what_a_percentage_can_be(driven, clock, bound, back):
    alert = driven(**bound)
    beyond = 10 if "below" in bound else 99
    sample(alert, clock, *[beyond] * 4, *[back] * 4, *[beyond] * 4)
    assert len(alert.alerts) == 2
    almost = back - 0.1 if "below" in bound else back + 0.1
    sample(alert, clock, *[almost] * 4, *[beyond] * 4)
    assert len(alert.alerts) == 2


def test_what_comes_before_the_end_of_the_first_step_does_not_count(driven, clock):
    alert = driven(warm=False)
    sample(alert, clock, *[0] * 100)
    alert.on_train_batch_end(0)
    sample(alert, clock, 0, 0, 0)
    assert alert.alerts == ()
    sample(alert, clock, 0)
    assert len(alert.alerts) == 1


def pace(alert, clock, **figures):
    for _ in range(4):
        alert.on_train_batch_end(0)
        alert._take_throughput(figures)
        clock.now += 1


def test_metrics_of_the_training_and_of_the_host(driven, clock):
    slow, host = driven("step_time_ms", above=100), driven("host_cpu_percent", above=90)
    pace(slow, clock, step_time_ms=120.0, input_wait_percent=None)
    sample(host, clock, *[(GpuSample(0.0, 0.0, host_cpu_percent=99.0),)] * 4)
    assert slow.alerts[0].text.startswith(
        "Expected step_time_ms to be at most 100. Found 120 on average for 3 s. No cause known to tfopt fits. "
        "Unknown here: input_wait_percent, "
    )
    assert (host.alerts[0].gpu_index, host.alerts[0].value) == (None, 99.0)


def test_large_figures_have_no_exponents(driven, clock):
    alert = driven("tokens_per_second", below=2e6)
    pace(alert, clock, tokens_per_second=1_234_567.0)
    assert alert.alerts[0].text.startswith(
        "Expected tokens_per_second to be at least 2,000,000. Found 1,234,567 on average for 3 s."
    )


def seconds(alert, clock, count):
    """So many samples, one a second, while no step ends."""
    for _ in range(count):
        alert._take_samples(gpus(97))
        clock.now += 1


def test_a_training_that_hangs(driven, clock):
    alert = driven("seconds_since_step", above=5)
    seconds(alert, clock, 9)  # at 0 s to 8 s: beyond the bound from 6 s on
    assert alert.alerts == ()
    seconds(alert, clock, 1)
    (found,) = alert.alerts
    assert (found.value, found.seconds, found.gpu_index) == ((6 + 7 + 8 + 9) / 4, 3.0, None)
    assert found.text.startswith("Expected seconds_since_step to be at most 5. Found 7.5 on average for 3 s. Likely ")
    assert "no training step has ended for 9 s" in found.cause
    seconds(alert, clock, 100)
    assert len(alert.alerts) == 1
    for _ in range(5):
        alert.on_train_batch_end(1)
        seconds(alert, clock, 1)
    seconds(alert, clock, 10)
    assert len(alert.alerts) == 2
    alert.on_train_end()
    alert.on_train_begin()  # the next fit starts over
    seconds(alert, clock, 20)
    assert alert.alerts == ()


def test_the_first_step_has_five_times_as_long(driven, clock):
    alert = driven("seconds_since_step", above=5, warm=False)
    seconds(alert, clock, 29)
    assert alert.alerts == ()
    seconds(alert, clock, 1)
    assert "ended for 29 s: the first step is running" in alert.alerts[0].cause


def test_validation_hangs_when_its_steps_do_not_end(driven, clock):
    alert = driven("seconds_since_step", above=5)
    alert.on_test_begin()
    for batch in range(20):
        alert.on_test_batch_begin(batch)
        seconds(alert, clock, 4)
    assert alert.alerts == ()
    seconds(alert, clock, 6)
    assert "ended for 9 s: validation is running" in alert.alerts[0].cause


@pytest.mark.parametrize(
    ("metric", "bound", "values"),
    [
        ("step_time_ms", {"above": 2000}, (3000, 4000, 5000, 6000)),
        ("step_time_p99_ms", {"above": 2000}, (3000, 4000, 5000, 6000)),
        ("examples_per_second", {"below": 4}, (8 / 3, 8 / 4, 8 / 5, 8 / 6)),
        # 50 % at 16 examples/s
        ("mfu_percent", {"below": 12.5}, (25 / 3, 25 / 4, 25 / 5, 25 / 6)),
    ],
)
def test_a_pace_falls_during_a_hang(driven, clock, metric, bound, values):
    alert = driven(metric, **bound)
    alert._throughput.batch_size = 8.0
    alert._take_throughput({"step_time_ms": 500.0, "examples_per_second": 16.0, "mfu_percent": 50.0})
    seconds(alert, clock, 6)
    assert alert.alerts == ()
    seconds(alert, clock, 1)
    (found,) = alert.alerts
    assert found.value == pytest.approx(sum(values) / 4)
    assert "no training step has ended for 6 s" in found.cause


@pytest.mark.parametrize("hook", ["on_test_begin", "on_epoch_end", "last step"])
def test_a_pace_does_not_fall_while_no_step_is_due(driven, clock, hook):
    alert = driven("step_time_ms", above=2000)
    if hook == "last step":
        alert.set_params({"steps": 2})
        alert.on_epoch_begin(0)
        alert.on_train_batch_end(1)
    else:
        getattr(alert, hook)(*[1] if hook == "on_epoch_end" else [])
    seconds(alert, clock, 100)
    assert alert.alerts == ()


def test_validation_is_no_part_of_the_next_epochs_first_step(driven, clock):
    alert = driven("step_time_ms", above=10_000)
    alert.on_test_begin()
    seconds(alert, clock, 60)
    alert.on_epoch_end(0)
    alert.on_epoch_begin(1)
    seconds(alert, clock, 8)
    assert alert.alerts == ()
    seconds(alert, clock, 8)
    assert alert.alerts[0].value == pytest.approx(sum(range(11, 15)) / 4 * 1000, rel=0.1)


@pytest.mark.parametrize(
    ("hook", "named"),
    [
        ("on_epoch_begin", "The step waits for its batch"),
        ("on_test_begin", "validation is running"),
        ("on_epoch_end", "between"),
    ],
)
def test_where_fit_stands_still(driven, clock, hook, named):
    alert = driven()
    alert.on_test_begin()
    alert.on_epoch_end(0)
    getattr(alert, hook)(*[] if hook == "on_test_begin" else [1])
    sample(alert, clock, *[0] * 4, step=False)
    assert "Likely cause: no training step has ended for 3 s" in alert.alerts[0].cause
    assert named in alert.alerts[0].cause


def test_gpus_that_no_replica_uses_are_told_once(driven, clock):
    alert = driven()
    sample(alert, clock, *[gpus(90, *[0] * 7)] * 20)
    (found,) = alert.alerts
    assert found.text.startswith("Expected gpu_utilization_percent of GPU:1 to be at least 50. Found 0 on average")
    assert "1 of 8 visible GPUs at work (GPU:0), GPU:1 to GPU:7 idle" in found.cause
    # Once they have worked, it is news again.
    sample(alert, clock, *[gpus(*[90] * 8)] * 9, *[gpus(90, *[0] * 7)] * 20)
    assert len(alert.alerts) == 2


def test_gpus_that_tensorflow_must_not_use_are_not_judged(driven, clock, monkeypatch):
    """After tf.config.set_visible_devices: the environment hides none of them."""
    only = [tf.config.PhysicalDevice("/physical_device:GPU:1", "GPU")]
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: only)
    alert = driven()
    sample(alert, clock, *[gpus(0, 90, 0, throttle_reasons=("thermal",))] * 20)
    assert alert.alerts == ()
    sample(alert, clock, *[gpus(0, 10, 0)] * 20)
    assert [found.gpu_index for found in alert.alerts] == [1]
    host = driven("host_cpu_percent", above=90)
    sample(host, clock, *[gpus(0, 90, host_cpu_percent=99.0)] * 20)
    assert host.alerts[0].value == 99.0


def test_a_straggler_is_told_once(driven, clock):
    alert = driven("sm_active_percent")
    alert._replicas = Replicas(8, 8, "MirroredStrategy")
    waiting = gpus(*[100] * 8, sm_active_percent=20.0, sm_clock_mhz=1980)
    hot = dataclasses.replace(waiting[3], sm_active_percent=90.0, sm_clock_mhz=990, throttle_reasons=("thermal",))
    sample(alert, clock, *[(*waiting[:3], hot, *waiting[4:])] * 20)
    (found,) = alert.alerts
    assert "the other GPUs wait for GPU:3, whose clock is 990 MHz (the others' median: 1,980)" in found.cause
    assert "throttled by heat" in found.cause
    # After a recovery it is news again, whichever GPU is the first to wait.
    busy = dataclasses.replace(waiting[0], sm_active_percent=90.0)
    sample(alert, clock, *[gpus(*[100] * 8, sm_active_percent=90.0, sm_clock_mhz=1980)] * 9)
    sample(alert, clock, (busy, *waiting[1:3], hot, *waiting[4:]), *[(*waiting[:3], hot, *waiting[4:])] * 20)
    assert [told.gpu_index for told in alert.alerts] == [0, 1]
    slow = driven("step_time_ms", above=100)
    slow._replicas = alert._replicas
    slow._take_samples((*waiting[:3], hot, *waiting[4:]))
    pace(slow, clock, step_time_ms=120.0)
    assert "wait for GPU:3" in slow.alerts[0].cause


@pytest.mark.parametrize(("policy", "named"), [("float32", True), ("mixed_bfloat16", False)])
def test_the_models_dtype_is_known(clock, policy, named):
    alert = UtilizationAlert("tensor_active_percent", below=10, for_seconds=3)
    alert.set_model(net(policy))
    alert.on_train_begin()
    alert.on_train_batch_end(0)
    sample(alert, clock, *[gpus(97, tensor_active_percent=0.0, sm_active_percent=90.0)] * 4)
    alert.on_train_end()
    assert ("computes in float32" in alert.alerts[0].cause) == named


@pytest.mark.parametrize("rows", [gpus(None), (GpuSample(0.0, 0.0),)])
def test_a_metric_that_nothing_gives_is_told_once(driven, clock, caplog, rows):
    alert = driven()
    sample(alert, clock, rows, rows, rows)
    assert told(caplog) == []
    sample(alert, clock, *[rows] * 9)
    assert told(caplog) == [
        "Expected readings of gpu_utilization_percent. Found none for 3 s, so UtilizationAlert cannot raise an "
        "alert; the training goes on. Choose a metric that is logged here."
    ]
    assert alert.alerts == ()


def test_a_gpu_that_is_lost_is_no_idle_one(driven, clock, caplog):
    alert = driven()
    sample(alert, clock, 90, *[None] * 20)
    assert (alert.alerts, told(caplog)) == ((), [])


def test_a_function_is_called_in_a_thread_of_its_own(driven, clock, caplog):
    calls = []
    alert = driven(action=lambda found: calls.append((found, threading.current_thread().name)))
    sample(alert, clock, *[10] * 4)
    alert.on_train_end()
    assert calls == [(alert.alerts[0], "tfopt-alert-action")]
    assert told(caplog) == []


def test_listeners_are_told_and_a_bounded_number_is_kept(driven, clock):
    class Page:
        def __init__(self):
            self.taken = []

        def take(self, alert):
            self.taken.append(alert)

    page, alert = Page(), driven(action=lambda found: None)
    alert.listeners.add(page.take)
    sample(alert, clock, *([10] * 4 + [90] * 4) * 110)
    assert len(page.taken) == 110
    assert alert.alerts == tuple(page.taken[-100:])


class Idle(keras.callbacks.Callback):
    """Holds a step until the alert has come, or for a minute if it never does."""

    def __init__(self, alert, step=1):
        super().__init__()
        self.alert, self.step = alert, step

    def on_train_batch_end(self, step, logs=None):
        end = time.monotonic() + 60
        while step == self.step and not self.alert.alerts and time.monotonic() < end:
            time.sleep(0.002)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_in_fit_with_a_logger_wherever_it_stands(fake_nvml, order):
    fake_nvml.gpus += [FakeGpu(utilization=10, uuid="GPU-a"), FakeGpu(utilization=90, uuid="GPU-b", bus=2)]
    alert, logger = (
        UtilizationAlert(for_seconds=0.05, action=lambda found: None),
        UtilizationLogger(interval_seconds=0.01),
    )
    both = [(alert, logger)[place] for place in order]
    fit(*both, Idle(alert))
    assert {found.gpu_index for found in alert.alerts} == {0}
    assert alert.alerts[0].value == pytest.approx(10)
    assert not logger.listeners._methods


def test_stop_ends_the_training_after_the_step_that_runs(fake_nvml, caplog):
    fake_nvml.gpus.append(FakeGpu(utilization=10))
    alert, model = UtilizationAlert(for_seconds=0.05, action="stop"), net()
    history = fit(UtilizationLogger(interval_seconds=0.01), alert, Idle(alert), model=model, epochs=5)
    assert len(history.epoch) == 1
    assert model.optimizer.iterations.numpy() == 2
    assert told(caplog)[0].endswith('The training is stopped (action="stop").')
    # The next fit begins anew.
    assert len(fit(model=model, epochs=2).epoch) == 2


def test_it_adds_its_sources_and_ends_with_them(fake_nvml, monkeypatch):
    fake_nvml.gpus.append(FakeGpu(utilization=10))
    monkeypatch.setattr(UtilizationLogger.__init__, "__defaults__", (None, 0.01, ("csv",)))
    alert = UtilizationAlert(for_seconds=0.05, action=lambda found: None)
    fit(alert, Idle(alert))
    assert alert.alerts
    gc.collect()
    assert not threads("alert-action", "sampler")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"metric": "gpu_utilisation_percent"}, ValueError, "Did you mean 'gpu_utilization_percent'"),
        ({"metric": "throttle_reasons"}, ValueError, "Expected a metric: "),
        ({"metric": "step_time_ms"}, ValueError, "Expected one bound for step_time_ms: .*below=None, above=None"),
        ({"below": 50, "above": 90}, ValueError, "Expected one bound.*For two bounds use two alerts"),
        ({"action": "explode"}, ValueError, "Expected an alert action .*'warn' or 'stop'. Received: 'explode'"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        UtilizationAlert(**arguments)


def test_a_bound_above_needs_no_word_about_below():
    for alert in (UtilizationAlert("gpu_temperature_celsius", above=85), UtilizationAlert(below=None, above=85)):
        assert str(alert._bound) == "at most 85"
    assert str(UtilizationAlert("sm_active_percent")._bound) == "at least 50"
    assert str(UtilizationAlert(below=30)._bound) == "at least 30"
