"""How `steps_per_launch="auto"` decides."""

from types import SimpleNamespace

import pytest

from tfopt.fit import trial
from tfopt.fit.trial import Trial


class Training:
    """Trainings whose steps take a time of their own, in milliseconds: alone, and together with others.

    Args:
        clock: Where `trial` reads the time.
        alone, together: Milliseconds of a step.
    """

    def __init__(self, monkeypatch, alone, together):
        self.now, self._ms = 0.0, {False: alone, True: together}
        monkeypatch.setattr(trial, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(trial, "first_step", lambda epochs: self.step)
        self.trial, self.in_flight = Trial(), SimpleNamespace(waited=0)

    def run(self, steps, epochs=100, known=True, waits=False, smaller=()):
        """Fits; returns the sizes of the launches of each epoch."""
        params = {"steps": steps if known else None, "epochs": epochs}
        running = SimpleNamespace(callbacks=SimpleNamespace(params=params), epochs=None)
        found = []
        for _ in range(epochs):
            self.step, launches = 0, []
            while self.step < steps:
                size = self.trial.steps_now(running, self.in_flight)
                if self.step in smaller or size > steps - self.step:
                    size = 1
                launches.append(size)
                self.in_flight.waited += waits
                self.now += size * self._ms[size > 1] / 1000
                self.step += size
            found.append(launches)
        return found


@pytest.mark.parametrize(("steps", "size"), [(128, 32), (100, 25), (101, 25), (30, 15), (16, 8), (60, 30)])
def test_the_size_leaves_the_least_of_an_epoch_over(monkeypatch, steps, size):
    training = Training(monkeypatch, alone=1, together=0.5)
    launches = training.run(steps, epochs=400)
    assert training.trial.chosen == size
    assert set(launches[-1]) <= {size, 1}
    assert launches[-1].count(1) == steps % size


def test_what_is_slower_is_not_kept(monkeypatch):
    training = Training(monkeypatch, alone=1, together=0.99)
    assert set(training.run(128)[-1]) == {1}
    assert training.trial.chosen == 1


def test_nothing_is_tried_where_the_device_is_the_limit(monkeypatch):
    training = Training(monkeypatch, alone=1, together=0.5)
    assert {size for launches in training.run(128, waits=True) for size in launches} == {1}
    assert training.trial.chosen == 1


@pytest.mark.parametrize(("steps", "epochs"), [(15, 10_000), (128, 10)])
def test_nothing_is_tried_that_cannot_be_repaid(monkeypatch, steps, epochs):
    training = Training(monkeypatch, alone=1, together=0.5)
    assert {size for launches in training.run(steps, epochs) for size in launches} == {1}
    assert training.trial.chosen is None  # a longer training may follow
    training.run(128, 1000)
    assert training.trial.chosen == 32


def test_epochs_of_unknown_length(monkeypatch):
    training = Training(monkeypatch, alone=1, together=0.5)
    training.run(1000, known=False)
    assert training.trial.chosen == 16


def test_a_turn_that_something_cut_short_does_not_count(monkeypatch):
    """Its launches had to be smaller: the trial goes on when they need not be."""
    training = Training(monkeypatch, alone=1, together=0.5)
    training.run(1024, smaller=range(1024))
    assert training.trial.chosen is None
    training.run(1024)
    assert training.trial.chosen == 32
