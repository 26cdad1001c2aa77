"""Eight GPUs compared with each other: what each shows, and by hand what that means."""

import pytest

from tfopt.causes.alert_causes import Situation, likely_cause
from tfopt.causes.between_gpus import Replicas, names, straggler, unused_gpus, waits_in_all_reduce
from tfopt.causes.readings import Readings
from tfopt.causes.training_verdict import verdict
from tfopt.hardware import GpuSample

NONE = Replicas(1, 1)
TWO, EIGHT = Replicas(2, 2, "MirroredStrategy"), Replicas(8, 8, "MirroredStrategy")


def gpu(index, utilization, **readings):
    return GpuSample(0.0, 0.0, index=index, gpu_utilization_percent=utilization, **readings)


def eight(*utilization, **by_index):
    """Eight GPUs with these utilisations, then idle ones; `_3={…}` gives GPU:3 other readings."""
    values = [*utilization, *[0] * (8 - len(utilization))]
    return tuple(gpu(index, value, **by_index.get(f"_{index}", {})) for index, value in enumerate(values))


TAKEN = {"gpu_memory_others_mib": 30_000.0}
MISTAKE = (
    "1 of 8 visible GPUs at work (GPU:0), GPU:1 to GPU:7 idle: the model, without a tf.distribute strategy, has 1 "
    "replica. Build and compile it under tfopt.distribute.strategy() or a tf.distribute.MirroredStrategy, or hide the "
    "others (CUDA_VISIBLE_DEVICES=0)."
)
MEANT = " That is fine if intended; hide the others to free them."


@pytest.mark.parametrize(
    ("gpus", "replicas", "idle", "mistake"),
    [
        (eight(90), NONE, range(1, 8), True),
        (eight(3), NONE, range(1, 8), True),  # it waits for input
        (eight(0, 0, 90), NONE, (0, 1, 3, 4, 5, 6, 7), True),
        (eight(90, 1, 1.9), NONE, range(1, 8), True),  # a display, a monitor
        (eight(90, 60), NONE, range(2, 8), False),  # model-parallel by hand
        (eight(90, 80), TWO, range(2, 8), False),
        (eight(90), Replicas(1, 1, "OneDeviceStrategy"), range(1, 8), False),
        (eight(90), Replicas(1, 2, "MultiWorkerMirroredStrategy"), range(1, 8), False),
        # another process has GPU:1 to itself, and GPU:2 for its memory
        (eight(90, 95, 0, _1=TAKEN, _2=TAKEN), NONE, range(3, 8), True),
        (eight(90, 95, _0=TAKEN, _1=TAKEN), NONE, range(2, 8), False),  # which of them is ours?
        (eight(90), Replicas(1, 1, None, frozenset({0, 5})), (5,), True),
    ],
)
def test_gpus_without_a_replica(gpus, replicas, idle, mistake):
    found = unused_gpus(gpus, replicas)
    assert (found.idle, found.mistake) == (tuple(idle), mistake)


@pytest.mark.parametrize(
    ("gpus", "replicas"),
    [
        (eight(90)[:1], NONE),
        ((gpu(0, None),), NONE),  # a MIG instance
        (eight(*[90] * 8), NONE),
        (eight(*[90] * 8), EIGHT),
        (eight(), NONE),  # nothing works: the input, validation, a hang
        (eight(90), EIGHT),  # each has a replica
        (eight(90), None),
        (eight(90, **{f"_{index}": TAKEN for index in range(1, 8)}), NONE),
        (eight(90), Replicas(1, 1, None, frozenset({0}))),  # hidden by tf.config
        (tuple(gpu(index, 90 if index == 0 else None) for index in range(8)), NONE),
    ],
)
def test_nothing_is_unused(gpus, replicas):
    assert unused_gpus(gpus, replicas) is None


def cause(gpus, replicas, *, index=None, metric="step_time_ms", wait=None, **facts):
    above = metric.startswith("step_time") or metric.startswith("seconds")
    readings = Readings(gpus=gpus, input_wait_percent=wait)
    return likely_cause(Situation(metric, above, readings, gpu_index=index, replicas=replicas, **facts))


def test_the_mistake_is_the_first_cause_and_one_of_all_idle_gpus():
    assert cause(eight(90), NONE).text == f"Likely cause: {MISTAKE}"
    assert cause(eight(90), NONE, wait=3.0).text == f"Likely cause: {MISTAKE}"
    for index in range(1, 8):
        found = cause(eight(90), NONE, index=index, metric="gpu_utilization_percent", wait=3.0)
        assert (found.text, found.gpus) == (f"Likely cause: {MISTAKE}", tuple(range(1, 8)))
    # The one at work has causes of its own, and the others would only wait for input with it.
    assert "many short kernels" in cause(eight(30), NONE, index=0, metric="gpu_utilization_percent", wait=3.0).text
    assert "waits for input 63 %" in cause(eight(30), NONE, wait=63.0).text


def test_idle_gpus_that_may_be_meant_so_are_a_fact():
    found = cause(eight(90, 80), TWO, index=5, metric="gpu_utilization_percent")
    assert found.text == (
        "2 of 8 visible GPUs at work (GPU:0, GPU:1), GPU:2 to GPU:7 idle: the model's MirroredStrategy has 2 "
        f"replicas.{MEANT}"
    )
    by_hand = cause(eight(90, 60), NONE, index=5, metric="gpu_utilization_percent").text
    assert by_hand.endswith(f"the model, without a tf.distribute strategy, has 1 replica.{MEANT}")
    # They are no reason for slow steps.
    assert cause(eight(90, 80), TWO).text.startswith("No cause known")
    assert cause(eight(90, 80), TWO, wait=1.0).text.startswith("No cause known")


def replicas_at_work(slow, usual=None, count=8, at=3):
    """GPUs that run all the time; one differs."""
    rows = [{"gpu_utilization_percent": 100} | (usual or {}) for _ in range(count)]
    rows[at] = rows[at] | slow
    return tuple(GpuSample(0.0, 0.0, index=index, **row) for index, row in enumerate(rows))


CLOCK = {"sm_clock_mhz": 1980}
ACTIVE = {"sm_active_percent": 30.0, "sm_clock_mhz": 1980, "gpu_power_watts": 300.0}


@pytest.mark.parametrize(
    ("slow", "usual", "differs", "reason"),
    [
        (
            {"sm_clock_mhz": 1200, "throttle_reasons": ("hw_thermal",)},
            CLOCK,
            "whose clock is 1,200 MHz (the others' median: 1,980)",
            "It is throttled by heat:",
        ),
        ({"sm_clock_mhz": 1200}, CLOCK, "whose clock is 1,200 MHz", "compare its clock limits"),
        (
            {"sm_active_percent": 80.0} | TAKEN,
            ACTIVE,
            "whose multiprocessors are active 80 % (the others' median: 30 %)",
            "Another process holds 30,000 MiB",
        ),
        ({"sm_active_percent": 80.0}, ACTIVE, "active 80 %", "its PCIe link (nvidia-smi --query-gpu="),
        (
            {"gpu_power_watts": 600.0},
            {"gpu_power_watts": 400.0},
            "which draws 600 W (the others' median: 400 W)",
            "PCIe",
        ),
        ({}, {"gpu_utilization_percent": 60}, "which is busy 100 % (the others' median: 60 %)", "PCIe"),
    ],
)
def test_a_straggler_with_its_likely_reason(slow, usual, differs, reason):
    gpus = replicas_at_work({"gpu_utilization_percent": 100} | slow, usual)
    found = straggler(gpus, EIGHT)
    assert found.index == 3
    assert found.text.startswith("the other GPUs wait for GPU:3, ")
    assert differs in found.text
    assert reason in found.text
    assert straggler(gpus, NONE) is None, "by hand, GPUs may do unlike things"
    assert straggler(gpus, TWO) is None, "which of them have replicas?"


@pytest.mark.parametrize(
    ("slow", "usual"),
    [
        ({}, CLOCK | ACTIVE),
        ({"sm_clock_mhz": 1700}, CLOCK),  # 86 %
        ({"sm_active_percent": 49.0}, ACTIVE),
        ({"gpu_power_watts": 370.0}, {"gpu_power_watts": 300.0}),
        ({"gpu_power_watts": 600.0}, ACTIVE),  # its multiprocessors say more
        ({"gpu_utilization_percent": 97}, {"gpu_utilization_percent": 80}),
        ({"gpu_utilization_percent": None}, CLOCK),
        ({"sm_clock_mhz": None}, CLOCK),
    ],
)
def test_no_straggler(slow, usual):
    assert straggler(replicas_at_work(slow, usual), EIGHT) is None


def test_a_straggler_is_one_cause_for_the_others():
    gpus = replicas_at_work({"sm_active_percent": 90.0}, ACTIVE)
    assert "wait for GPU:3" in cause(gpus, EIGHT).text
    found = cause(gpus, EIGHT, index=5, metric="sm_active_percent")
    assert found.gpus == (0, 1, 2, 4, 5, 6, 7)
    assert "wait for GPU:3" in found.text
    assert "wait for" not in cause(gpus, EIGHT, index=3, metric="sm_active_percent").text


def test_two_gpus():
    assert straggler(replicas_at_work({"sm_clock_mhz": 900}, CLOCK, count=2, at=1), TWO).index == 1


@pytest.mark.parametrize(
    ("gpus", "replicas", "waits"),
    [
        (eight(*[100] * 8), EIGHT, True),
        (eight(*[100] * 7), EIGHT, True),  # GPU:7 is lost
        (eight(*[100] * 8)[:1], Replicas(1, 2, "MultiWorkerMirroredStrategy"), True),
        (eight(*[100] * 8)[:1], NONE, False),
        (eight(), EIGHT, False),
        (eight(100, 100, *[50] * 6), EIGHT, False),
        (replicas_at_work({}, {"sm_active_percent": 90.0}), EIGHT, False),  # they compute
        (replicas_at_work({"sm_active_percent": 9.0}, {"sm_active_percent": 9.0}), EIGHT, True),
        ((gpu(0, None),), EIGHT, False),
        (eight(*[100] * 8), None, False),
    ],
)
def test_waiting_in_an_all_reduce(gpus, replicas, waits):
    assert waits_in_all_reduce(gpus, replicas) is waits
    for phase in ("training", "step"):
        text = cause(gpus, replicas, metric="seconds_since_step", stalled_seconds=99.0, phase=phase).text
        assert ("they wait in an all-reduce for a replica that has stopped" in text) is waits
    assert "all-reduce" not in cause(gpus, replicas, stalled_seconds=99.0, phase="validation").text


def said(gpus, replicas, wait=None):
    readings = Readings(gpus=gpus, input_wait_percent=wait)
    return verdict(readings, seconds=100.0, first_step_end=1.0, replicas=replicas).replace("\u00a0", " ")


def test_the_verdict_of_a_page():
    assert said(eight(90), NONE, wait=2.0) == (
        f"{MISTAKE} The GPU was busy 90 % of the time and steps waited for input in 2 % of it: the model sets the pace."
    )
    limited = said(eight(30), NONE, wait=63.0)
    assert limited.startswith(
        "The GPU was busy 30 % of the time and steps waited for input in 63 % of it: the input is"
    )
    assert limited.endswith(MISTAKE)
    meant = said(eight(90, 80), TWO)
    assert meant.startswith("The 2 GPUs were busy 85 % of the time (80 to 90 %)")
    assert meant.endswith(MEANT)
    slow = said(replicas_at_work({"sm_clock_mhz": 1200}, CLOCK), EIGHT)
    assert slow.startswith(
        "The 8 GPUs were busy 100 % of the time; whether steps waited for input is unknown, but the "
    )
    assert "but the other GPUs wait for GPU:3, whose clock is 1,200 MHz" in slow
    assert said(eight(*[90] * 8), EIGHT) == said(eight(*[90] * 8), None)


def test_names():
    assert names(eight()[:2]) == "GPU:0, GPU:1"
    assert names([gpu(index, 0) for index in (0, 2, 3, 4, 7)]) == "GPU:0, GPU:2 to GPU:4, GPU:7"
