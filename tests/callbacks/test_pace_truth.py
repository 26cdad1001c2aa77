"""ThroughputLogger's figures against sums over the steps: of a simulated loop, and of real fits that stall."""

import numpy as np
import pytest
from clock import Clock
from throughput import rows

from tfopt.callbacks import ThroughputLogger
from tfopt.callbacks.report_writer import Recorder
from tfopt.callbacks.throughput.input_wait import InputWait

BATCH = 32


class Gaps(InputWait):
    """Knows the gaps of a simulated iterator, of which tf.data keeps the last hundred."""

    def __init__(self):
        self.gaps, self.batches = [], 0
        super().__init__()

    def find(self, *, skipped_seconds):
        self._iterator, self._taken = self, self.batches + int(skipped_seconds is not None)
        self._gaps = self.gaps[-100:]
        return True

    def _read_gaps(self):
        self._taken = max(self._taken, self.batches)
        return self.gaps[-100:]


class Loop:
    """Runs steps that each wait for their batch and then work, on a clock of its own."""

    def __init__(self, monkeypatch, set_clock, folder=None, **options):
        monkeypatch.setattr("tfopt.callbacks.throughput_logger.takes_one_batch_per_step", lambda model: True)
        self.clock = Clock(0.0)
        set_clock(self.clock, ThroughputLogger, Recorder)
        self.logger = ThroughputLogger(folder, examples_per_step=BATCH, **options)
        self.gaps = self.logger._input = Gaps()
        self.logger.listeners.add(self.take)
        self.told, self.at = [], []

    def take(self, row):
        self.told.append(row)
        self.at.append(self.clock.now)

    def epoch(self, epoch, steps, between=0.0):
        """Runs one epoch of (wait, work) pairs in seconds and returns its logs."""
        self.logger.on_epoch_begin(epoch)
        for number, (wait, work) in enumerate(steps):
            if number:
                self.gaps.gaps.append(1e6 * steps[number - 1][1])
            self.clock.now += wait
            self.gaps.batches += 1
            self.clock.now += work
            self.logger.on_train_batch_end(number)
        self.clock.now += between
        logs = {}
        self.logger.on_epoch_end(epoch, logs)
        return logs


def truth(steps):
    """The share of waiting and the rate of (wait, work) pairs."""
    seconds = sum(wait + work for wait, work in steps)
    return 100 * sum(wait for wait, _ in steps) / seconds, len(steps) * BATCH / seconds


def stalled(count, stalls, seed=0):
    """Steps of some 20 ms, some of which wait six seconds for their batch."""
    random = np.random.default_rng(seed)
    work = random.uniform(0.015, 0.025, count)
    return [(6.0 if number in stalls else 0.001, float(seconds)) for number, seconds in enumerate(work)]


def test_rows_epochs_and_means_of_a_training_with_stalls(monkeypatch, tmp_path, set_clock):
    loop = Loop(monkeypatch, set_clock, tmp_path, window_steps=40)
    page = Recorder("net", loop.logger, None)
    epochs = [stalled(301, {100, 160, 161, 299}), stalled(300, {0, 250}, seed=1)]
    loop.logger.on_train_begin()
    for number, steps in enumerate(epochs):
        logs = loop.epoch(number, steps, between=3.0)
        # The first step of the training compiles; no gap follows an epoch's last step.
        wait, _ = truth(steps[number == 0 : -1])
        _, rate = truth(steps[number == 0 :])
        assert logs["input_wait_percent"] == pytest.approx(wait)
        assert logs["examples_per_second"] == pytest.approx(rate)
        times = [1000 * sum(step) for step in steps[number == 0 :]]
        found = [logs[key] for key in ("step_time_ms", "step_time_p95_ms", "step_time_p99_ms")]
        assert found == pytest.approx(np.percentile(times, (50, 95, 99)), rel=0.01)
    loop.logger.on_train_end()
    # Each row's wait is that of its own steps.
    timed, last_ones = [*epochs[0][1:], *epochs[1]], {299, 599}
    done = 0
    for row in rows(tmp_path):
        numbers = range(done, done + row["window_steps"])
        done += row["window_steps"]
        wait, _ = truth([timed[number] for number in numbers if number not in last_ones])
        _, rate = truth([timed[number] for number in numbers])
        assert row["input_wait_percent"] == pytest.approx(wait)
        assert row["examples_per_second"] == pytest.approx(rate)
        assert row["window_seconds"] == pytest.approx(sum(sum(timed[number]) for number in numbers))
    assert done == 600
    # Means over what listeners were told are those of the whole.
    for row, now in zip(loop.told, loop.at, strict=True):
        loop.clock.now = now
        page.take_steps(row)
    wait, rate = truth(timed)
    series = page._timeline.series
    assert series["examples_per_second"][None].mean() == pytest.approx(rate)
    # The two last steps waited as long as the others of their windows, as far as anybody knows.
    assert series["input_wait_percent"][None].mean() == pytest.approx(wait, abs=0.2)


def test_a_window_of_one_long_step_has_its_wait(monkeypatch, set_clock):
    loop = Loop(monkeypatch, set_clock)
    loop.logger.on_train_begin()
    loop.epoch(0, [(1.0, 1.0)] * 2 + [(0.0, 2.0), (6.0, 2.0), (0.0, 2.0), (0.0, 2.0)])
    assert [row["input_wait_percent"] for row in loop.told] == [pytest.approx(wait) for wait in (50, 0, 75, 0)] + [None]


def test_rows_also_come_by_time_and_what_is_left_is_written_however_the_fit_ends(monkeypatch, tmp_path, set_clock):
    loop = Loop(monkeypatch, set_clock, tmp_path, window_steps=1000)
    loop.logger.on_train_begin()
    loop.logger.on_epoch_begin(0)
    for number in range(30):  # of 10 s
        loop.clock.now += 10.0
        loop.logger.on_train_batch_end(number)
    loop.logger._close()  # as at the end of a fit that an exception ended
    found = rows(tmp_path)
    assert [row["window_steps"] for row in found] == [6, 6, 6, 6, 4], (
        "the first compiles, and the last waits for its gap"
    )
    assert {row["examples_per_second"] for row in found} == {3.2}
    assert [row["step"] for row in found] == [7, 13, 19, 25, 29]
