"""The suite `batch`: times for the same examples, and that a wrong update or a changed model is noticed."""

from dataclasses import replace

import pytest

from tfopt.bench.cases import CPU, training
from tfopt.bench.cases.measuring import measure
from tfopt.bench.suites import batch
from tfopt.measure import StepTimes

TINY = {"blocks": 1, "width": 16, "heads": 2, "vocabulary": 256, "length": 16}


def test_times_are_for_the_same_examples():
    times = StepTimes(repeats_ms=((10.0, 12.0),), steps_per_sample=4, first_step_seconds=1.0, examples_per_step=8)
    scaled = batch._times(times, 512)
    assert scaled.repeats_ms == ((640.0, 768.0),)
    assert scaled.examples_per_second == times.examples_per_second


def test_losses_must_agree_and_memory_is_shown():
    accumulated, _ = batch.cases(CPU)
    assert accumulated.judge([87.0, 5.0, 4.0], [36.2, 5.001, 4.001]).text == "36 MiB"
    assert not accumulated.judge([87.0, 5.0, 4.0], [36.2, 5.0, 4.1]).passed


@pytest.mark.slow
def test_accumulated_updates_are_those_of_the_large_batch(monkeypatch):
    monkeypatch.setattr(training, "_SMALL", replace(training._SMALL, sizes=TINY))
    case = replace(batch.cases(CPU)[0], repeats=1)
    large, accumulated = measure(case).variants
    assert (large.check.passed, accumulated.check.passed) == (True, True)
    assert large.times.examples_per_step == accumulated.times.examples_per_step == 4


@pytest.mark.slow
def test_the_recommended_batch_is_timed_and_the_search_changes_nothing(monkeypatch):
    monkeypatch.setattr(batch, "_MOST", 32)
    case = replace(batch.cases(CPU)[1], repeats=1)
    few, recommended = measure(case).variants
    assert recommended.check.passed
    assert few.times.examples_per_step == recommended.times.examples_per_step == 32
