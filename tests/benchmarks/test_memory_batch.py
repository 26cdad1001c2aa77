"""benchmarks/memory_batch.py: what each way takes, and that a wrong loss, update or changed model is noticed."""

from dataclasses import replace

import memory_batch
import pytest

from tfopt.bench.cases import CPU, GPU
from tfopt.bench.cases.measuring import measure
from tfopt.kernels import explain
from tfopt.measure import StepTimes

TINY = {"blocks": 3, "width": 32, "heads": 2, "vocabulary": 2048, "length": 64}


def test_losses_must_agree_and_memory_is_shown():
    case, *_ = memory_batch.cases(CPU)
    check = case.judge([80.0, 5.0, 4.0], [51.4, 5.001, 4.001])
    assert (check.passed, check.text) == (True, "51 MiB")
    assert not case.judge([80.0, 5.0, 4.0], [51.4, 5.0, 4.1]).passed


def test_on_a_gpu_it_is_gpt_2_itself(monkeypatch):
    made = []
    monkeypatch.setattr(memory_batch.gpt2, "model", lambda **options: made.append(options) or "net")
    monkeypatch.setattr(memory_batch.kernels, "use_flash_attention", made.append)
    monkeypatch.setattr(memory_batch, "StepTimer", lambda net, batch: made.append(batch[0].shape) or print)
    case, *_ = memory_batch.cases(GPU)
    assert case.workload == "gpt2"
    case.variants[0].timer(None)
    assert made == [{"jit_compile": True}, "net", (16, 1024)]


@pytest.mark.slow
def test_each_way_takes_less_and_trains_the_same(monkeypatch):
    monkeypatch.setattr(memory_batch, "_SMALL", replace(memory_batch._SMALL, sizes=TINY))
    case, *_ = memory_batch.cases(CPU)
    in_pieces = case.variants[-1].values.args[1]
    assert "chunked cross-entropy" in [row.kernel for row in explain(memory_batch._SMALL.net(in_pieces)).layers]
    outcome = measure(replace(case, repeats=1))
    assert [variant.check.passed for variant in outcome.variants] == [True] * 4
    mib = [variant.check.values[0] for variant in outcome.variants]
    assert max(mib[1:]) < 0.95 * mib[0]


def test_times_are_for_the_same_examples():
    times = StepTimes(repeats_ms=((10.0, 12.0),), steps_per_sample=4, first_step_seconds=1.0, examples_per_step=8)
    scaled = memory_batch._times(times, 512)
    assert scaled.repeats_ms == ((640.0, 768.0),)
    assert scaled.examples_per_second == times.examples_per_second


def test_losses_of_updates_must_agree():
    _, accumulated, _ = memory_batch.cases(CPU)
    assert accumulated.judge([87.0, 5.0, 4.0], [36.2, 5.001, 4.001]).text == "36 MiB"
    assert not accumulated.judge([87.0, 5.0, 4.0], [36.2, 5.0, 4.1]).passed


@pytest.mark.slow
def test_accumulated_updates_are_those_of_the_large_batch(monkeypatch):
    monkeypatch.setattr(memory_batch, "_SMALL", replace(memory_batch._SMALL, sizes=TINY))
    case = replace(memory_batch.cases(CPU)[1], repeats=1)
    large, accumulated = measure(case).variants
    assert (large.check.passed, accumulated.check.passed) == (True, True)
    assert large.times.examples_per_step == accumulated.times.examples_per_step == 4


@pytest.mark.slow
def test_the_recommended_batch_is_timed_and_the_search_changes_nothing(monkeypatch):
    monkeypatch.setattr(memory_batch, "_MOST", 32)
    case = replace(memory_batch.cases(CPU)[2], repeats=1)
    few, recommended = measure(case).variants
    assert recommended.check.passed
    assert few.times.examples_per_step == recommended.times.examples_per_step == 32
