"""GPM: the metrics between two samples, and what becomes of everything that can go wrong with them."""

import contextlib
import math
from dataclasses import replace

import pynvml
import pytest
from fake_nvml import GPM, GPM_FUNCTIONS, READING, FakeGpu, tick
from nvml_devices import machine

from tfopt.hardware import GpuSampler
from tfopt.hardware.nvml import driver
from tfopt.hardware.nvml.gpm import METRICS
from tfopt.hardware.nvml.gpu_reading import GPU_FIELDS
from tfopt.hardware.nvml.return_codes import NvmlError

FIRST = replace(READING, pcie_rx_mib_per_second=None, pcie_tx_mib_per_second=None)
LATER = replace(
    FIRST,
    sm_active_percent=95.0,
    sm_occupancy_percent=14.0,
    tensor_active_percent=92.0,
    dram_active_percent=16.0,
    pcie_rx_mib_per_second=3.5,
    pcie_tx_mib_per_second=0.25,
    nvlink_rx_mib_per_second=1000.0,
    nvlink_tx_mib_per_second=2000.0,
)

MIG_FUNCTIONS = ["nvmlDeviceGetDeviceHandleFromMigDeviceHandle", "nvmlDeviceGetGpuInstanceId", "nvmlGpmMigSampleGet"]


@pytest.fixture
def hopper(fake_nvml):
    fake_nvml.gpus.append(FakeGpu(gpm=dict(GPM)))
    return fake_nvml.gpus[0]


def read(fake, *, after=1.0, restart=False):
    """A reading of the last GPU, some seconds after the one before."""
    fake.now += after
    instances = [instance for instance in fake.gpus[-1].instances or () if instance]
    return driver.door().read((instances or fake.gpus)[-1].uuid, restart=restart)


@pytest.mark.usefixtures("hopper")
def test_the_first_reading_has_no_metrics_and_the_next_have_all(fake_nvml):
    assert [read(fake_nvml) for _ in range(3)] == [FIRST, LATER, LATER]
    assert fake_nvml.calls["nvmlDeviceGetPcieThroughput"] == 0  # 21 ms each
    assert fake_nvml.calls["nvmlGpmQueryDeviceSupport"] == 1


def test_without_gpm_there_is_the_slow_pcie_call(hopper, fake_nvml):
    hopper.gpm = None
    assert [read(fake_nvml) for _ in range(2)] == [READING, READING]
    assert fake_nvml.calls["nvmlGpmSampleAlloc"] == 0


@pytest.mark.usefixtures("hopper")
def test_an_older_pynvml_has_no_gpm(fake_nvml, caplog):
    fake_nvml.lacks.update(GPM_FUNCTIONS)
    assert [read(fake_nvml) for _ in range(2)] == [READING, READING]
    assert not caplog.records


def test_within_the_refresh_time_the_last_metrics_are_repeated(hopper, fake_nvml):
    assert read(fake_nvml) == FIRST
    assert read(fake_nvml, after=0.05) == FIRST
    assert read(fake_nvml, after=0.06) == LATER
    hopper.gpm = GPM | {"NVML_GPM_METRIC_SM_UTIL": 11.0}
    assert read(fake_nvml, after=0.09) == LATER
    assert fake_nvml.calls["nvmlGpmSampleGet"] == 2
    assert read(fake_nvml, after=0.02) == replace(LATER, sm_active_percent=11.0)


@pytest.mark.usefixtures("hopper")
def test_a_new_reader_begins_anew(fake_nvml):
    read(fake_nvml)
    assert [read(fake_nvml, after=3600.0, restart=True), read(fake_nvml)] == [FIRST, LATER]
    assert read(fake_nvml, after=0.01, restart=True) == FIRST


@pytest.mark.parametrize(
    ("value", "percent", "rate"),
    [
        (0.0, 0.0, 0.0),
        (100.0, 100.0, 100.0),
        (100.4, 100.0, 100.4),
        (150.0, None, 150.0),
        (-0.1, None, None),
        (1e9, None, None),
        (math.nan, None, None),
        (math.inf, None, None),
    ],
)
def test_what_cannot_be_true_is_unknown(value, percent, rate, hopper, fake_nvml):
    hopper.gpm = dict.fromkeys(GPM, value)
    read(fake_nvml)
    expected = {field: percent if field.endswith("_percent") else rate for field in METRICS}
    assert read(fake_nvml) == replace(FIRST, **expected)


@pytest.mark.parametrize("field", METRICS)
def test_a_metric_marked_as_failed_is_unknown_and_the_others_are_read(field, hopper, fake_nvml):
    hopper.gpm_failed = {METRICS[field]}
    read(fake_nvml)
    assert read(fake_nvml) == replace(LATER, **{field: None})
    assert fake_nvml.calls["nvmlDeviceGetPcieThroughput"] == 0


def test_every_field_has_its_metric():
    assert METRICS.keys() <= set(GPU_FIELDS)
    assert set(METRICS.values()) == set(GPM)


@pytest.mark.usefixtures("hopper")
def test_the_buffers_are_freed_when_the_gpu_is_lost(fake_nvml):
    for _ in range(3):
        read(fake_nvml)
        read(fake_nvml)
        fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST)
        with pytest.raises(NvmlError):
            read(fake_nvml)
        fake_nvml.recover()
        assert not fake_nvml.held
        assert fake_nvml.calls["nvmlGpmSampleFree"] == fake_nvml.calls["nvmlGpmSampleAlloc"]
    assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER]


def test_a_lost_gpu_leaves_the_others_metrics(fake_nvml):
    """One of eight, for three rows; then it is back."""
    fake_nvml.gpus += [FakeGpu(uuid=f"GPU-{bus}", bus=bus, gpm=dict(GPM)) for bus in range(8)]
    sampler, active = GpuSampler(), []
    for number in range(8):
        if number == 2:
            fake_nvml.fail("nvmlDeviceGetPowerUsage", pynvml.NVML_ERROR_GPU_IS_LOST, gpu=fake_nvml.gpus[3])
        elif number == 5:
            fake_nvml.recover()
        fake_nvml.now += 1.0
        active.append([row.sm_active_percent for row in tick(sampler)])
    healthy = [[None] * 7, *[[95.0] * 7] * 7]
    assert [row[:3] + row[4:] for row in active] == healthy
    assert [row[3] for row in active] == [None, 95.0, None, None, None, None, 95.0, 95.0]
    assert fake_nvml.calls["nvmlDeviceGetHandleByUUID"] == 8 + 3  # the lost one's only
    assert len(fake_nvml.held) == 16


@pytest.mark.usefixtures("hopper")
def test_nothing_is_freed_twice_when_nvml_was_shut_down(fake_nvml):
    read(fake_nvml)
    fake_nvml.shut_down()
    with pytest.raises(NvmlError, match="not started"):
        read(fake_nvml)
    assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER]
    assert fake_nvml.calls["nvmlGpmSampleFree"] == 2


@pytest.mark.usefixtures("hopper")
def test_a_shut_down_that_another_question_met_begins_anew_too(fake_nvml):
    read(fake_nvml)
    fake_nvml.shut_down()
    with pytest.raises(NvmlError, match="not started"):
        driver.door().devices()
    assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER]
    assert fake_nvml.calls["nvmlGpmSampleFree"] == 2


@pytest.mark.usefixtures("hopper")
def test_a_buffer_that_was_had_before_the_second_failed_is_used_later(fake_nvml):
    fake_nvml.fail("nvmlGpmSampleAlloc", pynvml.NVML_ERROR_MEMORY, at=2)
    assert [read(fake_nvml) for _ in range(3)] == [READING] * 3
    assert len(fake_nvml.held) == 1
    fake_nvml.recover()
    assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER]
    assert len(fake_nvml.held) == 2


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("function", GPM_FUNCTIONS)
def test_every_error_is_survived_and_the_slow_pcie_call_stands_in(function, error_codes, fake_nvml, caplog):
    expected = [FIRST, READING] if function == "nvmlGpmMetricsGet" else [READING]  # the first asks for no metrics
    for code in error_codes:
        fake_nvml.fail(function, code)
        for _ in range(3):
            try:
                assert read(fake_nvml) in expected, code
            except NvmlError:
                assert not fake_nvml.held or code == pynvml.NVML_ERROR_UNINITIALIZED
                continue
        assert len(caplog.records) <= 1, code
        fake_nvml.recover()
        assert read(fake_nvml) in (FIRST, LATER), code  # only the metrics failed: the last sample is there
        assert [read(fake_nvml), read(fake_nvml)] == [LATER, LATER], code
        assert len(fake_nvml.held) == 2 or code == pynvml.NVML_ERROR_UNINITIALIZED


@pytest.mark.usefixtures("hopper")
def test_metrics_that_fail_leave_the_slow_pcie_call(fake_nvml):
    fake_nvml.fail("nvmlGpmMetricsGet", pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    assert [read(fake_nvml) for _ in range(3)] == [FIRST, READING, READING]


@pytest.mark.usefixtures("hopper")
def test_an_error_at_a_later_sample_loses_two_readings(error_codes, fake_nvml):
    for code in error_codes:
        assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER]
        fake_nvml.fail("nvmlGpmSampleGet", code)
        with contextlib.suppress(NvmlError):
            assert read(fake_nvml) == READING, code
        fake_nvml.recover()
        assert [read(fake_nvml), read(fake_nvml)] == [FIRST, LATER], code


@pytest.mark.parametrize("function", MIG_FUNCTIONS)
def test_every_error_of_a_mig_instance_is_survived(function, error_codes, fake_nvml, caplog):
    fake_nvml.gpus, _ = machine("mig")
    for code in error_codes:
        fake_nvml.fail(function, code)
        for _ in range(2):
            try:
                assert read(fake_nvml).sm_active_percent is None, code
            except NvmlError:
                continue
        assert len(caplog.records) <= 1, code
        fake_nvml.recover()
        assert [read(fake_nvml).sm_active_percent, read(fake_nvml).sm_active_percent] == [None, 95.0], code


def test_each_sampler_begins_with_its_own_first_sample(hopper, fake_nvml):
    samplers = GpuSampler(), GpuSampler()
    active = []
    for sampler in (samplers[0], samplers[0], samplers[1], samplers[0], samplers[1]):
        fake_nvml.now += 1.0
        active += [row.sm_active_percent for row in tick(sampler)]
    assert active == [None, 95.0, None, 95.0, 95.0]
    first, *_, last = samplers[0].samples
    assert (first.pcie_rx_mib_per_second, last.pcie_rx_mib_per_second) == (None, 3.5)


@pytest.mark.usefixtures("hopper")
def test_a_second_run_of_a_sampler_begins_anew():
    sampler = GpuSampler()
    tick(sampler)
    sampler._begin()
    (row,) = tick(sampler)
    assert row.sm_active_percent is None
