"""The sizes chosen, against those that trying every size gives."""

import hypothesis
import pytest
from hypothesis import strategies
from models import batch, small_net

from tfopt import hardware, memory
from tfopt.batch import find, trials
from tfopt.batch import limits as limits_module
from tfopt.batch.examples import Examples
from tfopt.batch.growing import grow, recommended
from tfopt.batch.trials import Trial
from tfopt.measure import StepTimes

GRID = [*range(1, 9), *range(16, 20_001, 8)]


def times(size, rate):
    ms = 1000 * size / rate
    return StepTimes(repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=0.1, examples_per_step=size)


def tried(size, capacity, rate):
    if size > capacity:
        return Trial(batch_size=size, outcome="out of memory", reason="OOM")
    return Trial(batch_size=size, outcome="fits", times=times(size, rate(size)))


@hypothesis.settings(max_examples=200)
@hypothesis.example(half=1 / 3, capacity=32, most=1)
@hypothesis.given(
    half=strategies.floats(0.1, 2000), capacity=strategies.integers(0, 800), most=strategies.integers(1, 900)
)
def test_both_sizes_are_those_of_trying_all(half, capacity, most):
    def rate(size):
        return 1e6 * size / (size + half)

    for limit in (None, most):
        made = grow(lambda size: tried(size, capacity, rate), limit)
        fitting = [size for size in GRID if size <= capacity and (limit is None or size <= limit)]
        best = max(map(rate, fitting), default=0.0)
        assert max((size for size, trial in made.items() if trial.fits), default=0) == max(fitting, default=0)
        shares = 0.97, 0.97 - 1e-9, 0.97 + 1e-9  # rounding may put a rate of exactly 0.97 on either side
        least = [min((size for size in fitting if rate(size) >= share * best), default=0) for share in shares]
        assert recommended(made) in least
        assert set(made) <= set(GRID)
        assert len(made) <= 30


@hypothesis.settings(max_examples=100)
@hypothesis.given(half=strategies.floats(1, 3000), capacity=strategies.integers(800, 20_000))
def test_large_sizes_are_right_within_a_hundredth(half, capacity):
    def rate(size):
        return 1e6 * size / (size + half)

    made = grow(lambda size: tried(size, capacity, rate))
    largest = max(size for size, trial in made.items() if trial.fits)
    truth = min(size for size in GRID if rate(size) >= 0.97 * rate(largest))
    assert capacity * 0.99 - 8 < largest <= capacity
    assert truth <= recommended(made) <= max(1.01 * truth, truth + 8)
    assert len(made) <= 30


def test_a_peak_in_the_middle_is_found():
    def rate(size):
        return 1e5 * size if size <= 64 else 64e5 * (64 / size)  # such as a cache that overflows

    assert recommended(grow(lambda size: tried(size, 4096, rate), 4096)) == 64


def test_sizes_whose_step_takes_over_ten_seconds_are_not_tried():
    made = grow(lambda size: tried(size, 10**9, lambda _: 10.0))
    assert max(made) == 64  # 6.4 s


def test_after_a_trial_that_hung_no_more_are_tried_near_it():
    def hangs(size):
        fits = tried(size, 100, lambda n: 1e6 * n / (n + 1000))
        return fits if fits.fits else Trial(batch_size=size, outcome="hung", reason="no answer")

    made = grow(hangs)
    assert max(size for size in made if made[size].fits) == 64
    assert [size for size, trial in made.items() if not trial.fits] == [128]


def test_one_failure_in_the_middle_only_costs_that_size():
    asked = []

    def fails_once(size):
        asked.append(size)
        found = tried(size, 512, lambda n: 1e6 * n / (n + 200))
        return Trial(batch_size=size, outcome="killed", reason="signal 9") if len(asked) == 9 else found

    made = grow(fails_once, 512)
    assert len(made) > 9
    assert max(size for size in made if made[size].fits) == 512
    assert made[recommended(made)].fits


@pytest.mark.parametrize("half", [0.5, 100.0])
def test_find_reads_the_throughput_of_its_timer(here, unestimated, monkeypatch, half):
    class Timer:
        def __init__(self, model, data):
            self.size = int(next(iter(data))[0].shape[0])

        def __call__(self, steps, *, warmup, samples):
            return times(self.size, 1e6 * self.size / (self.size + half))

    monkeypatch.setattr(trials, "StepTimer", Timer)
    found = find(small_net(), batch(16), largest=250)
    sizes = [size for size in GRID if size <= 250]
    truth = next(size for size in sizes if size / (size + half) >= 0.97 * 248 / (248 + half))
    assert (found.largest, found.recommended) == (248, truth)


def test_estimates_lie_on_lines_between_the_known_sizes():
    known = limits_module.Limits(None, "", {0: 10.0, 8: 20.0, 32: 50.0})
    assert [known.estimated_mib(size) for size in (0, 4, 8, 20, 32, 64)] == [10.0, 15.0, 20.0, 35.0, 50.0, 90.0]
    assert limits_module.Limits(None, "", {}).estimated_mib(8) is None


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 1,000 MiB, of which TensorFlow may take 900, holds 300 and uses 100; others take 150."""
    mib = 2**20
    monkeypatch.setattr(limits_module.gpu_memory, "first_gpu", lambda: "GPU:0")
    monkeypatch.setattr(limits_module.gpu_memory, "limit_bytes", lambda device: 900 * mib)
    monkeypatch.setattr(limits_module.tf.config, "list_logical_devices", lambda kind: ["GPU:0"])
    found = {"index": 0, "in_use_mib": 100.0, "peak_mib": 200.0}

    def use(**parts):
        monkeypatch.setattr(memory, "usage", lambda: (memory.MemoryUsage(**found | parts),))

    return use


def test_on_a_gpu_the_limit_is_what_is_free_and_what_the_model_has(gpu):
    estimate = memory.estimate(small_net(), batch(4))
    own = estimate.weights_mib + estimate.optimizer_mib
    gpu(held_mib=300.0, others_mib=150.0, total_mib=1000.0)
    assert limits_module._free(estimate) == (
        pytest.approx(850 - 100 + own),
        "the GPU memory that is free for TensorFlow",
    )
    gpu(held_mib=None, others_mib=None, total_mib=1000.0)
    assert limits_module._free(estimate)[0] == pytest.approx(900 - 100 + own)
    gpu(held_mib=300.0, others_mib=150.0, total_mib=1000.0, in_use_mib=0.0)  # the model is elsewhere
    assert limits_module._free(estimate)[0] == 850


@pytest.mark.slow
def test_where_no_memory_is_free_the_trials_decide(gpu):
    gpu(held_mib=300.0, others_mib=1000.0, total_mib=1000.0)
    model = small_net()
    assert limits_module.limits(model, Examples(model, batch(4)), 16, None).most == 16


def test_another_process_gets_what_nobody_holds(gpu):
    gpu(held_mib=300.0, others_mib=150.0, total_mib=5000.0)
    assert limits_module.room_outside_mib() == 5000 - 300 - 150 - 1024
    gpu(held_mib=None, others_mib=150.0, total_mib=5000.0)
    assert limits_module.room_outside_mib() == 0.0


@pytest.mark.slow
@pytest.mark.no_gpu
def test_without_a_gpu_the_limit_is_the_memory_available(monkeypatch):
    assert limits_module.room_outside_mib() == float("inf")
    host = hardware.host()
    monkeypatch.setattr(
        limits_module.hardware, "host", lambda: type(host)(**host.to_dict() | {"memory_available_mib": 1.0})
    )
    model = small_net()
    found = limits_module.limits(model, Examples(model, batch(16)), None, None)
    assert found.why == "the memory that is available"
    own = found.known_mib[0]
    assert found.known_mib[found.most] <= 0.9 + own < memory.estimate(model, batch(2 * found.most)).total_mib
