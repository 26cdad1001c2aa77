import pytest

from tfopt.bench.cases import Case, Variant, device
from tfopt.bench.cases.measuring import measure
from tfopt.bench.results import DeviceRates
from tfopt.bench.workloads import digits
from tfopt.measure import StepTimes


def test_rates_are_sizes_over_seconds(monkeypatch):
    monkeypatch.setattr(device, "matmul_tflops", {"float32": 60.0, "bfloat16": 700.0}.get)
    monkeypatch.setattr(device, "copy_gib_per_second", lambda: 0.25)
    monkeypatch.setattr(device.tf.config, "list_logical_devices", lambda kind: [])
    assert device.device_rates(["float32", "bfloat16"]) == DeviceRates(
        matmul_tflops={"bfloat16": 700.0, "float32": 60.0},
        copy_gib_per_second=0.25,
        host_to_device_gib_per_second=None,
    )


@pytest.mark.gpu
def test_no_copy_to_the_gpu_is_faster_than_one_on_it():
    rates = device.device_rates([])
    assert 0.5 < rates.host_to_device_gib_per_second < rates.copy_gib_per_second


def test_a_case_relates_its_model_to_them(monkeypatch):
    def rates(dtypes):
        return DeviceRates(
            matmul_tflops=dict.fromkeys(dtypes, 2.0), copy_gib_per_second=1.0, host_to_device_gib_per_second=None
        )

    monkeypatch.setattr("tfopt.bench.cases.measuring.device_rates", rates)
    times = StepTimes(repeats_ms=((10.0, 10.0),), steps_per_sample=1, first_step_seconds=1.0, examples_per_step=100)
    unknown = StepTimes(repeats_ms=((10.0, 10.0),), steps_per_sample=1, first_step_seconds=1.0)
    variants = [
        Variant(name="a", note="", timer=lambda stack: lambda: times, dtype="float32"),
        Variant(name="b", note="", timer=lambda stack: lambda: times),
        Variant(name="c", note="", timer=lambda stack: lambda: unknown, dtype="float32"),
    ]
    case = Case(
        suite="s", workload="w", question="?", unit="step", variants=variants, repeats=2, model=digits.perceptron
    )
    outcome = measure(case)
    operations = 2 * (2 * 784 * 512 + 3 * (512 * 512 + 512 * 10))
    assert outcome.operations_per_example == operations
    found = [variant.metrics.mfu_percent for variant in outcome.variants]
    assert found == [pytest.approx(100 * operations * 10_000 / 2e12), None, None]
