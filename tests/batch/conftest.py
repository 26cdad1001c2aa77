import pytest

from tfopt.batch import process, searching, trials
from tfopt.batch.limits import Limits
from tfopt.errors import UnsupportedError


@pytest.fixture
def few_steps(monkeypatch):
    """Trials of two timed steps."""
    monkeypatch.setattr(trials, "_ENOUGH_MS", 0.0)


@pytest.fixture
def here(monkeypatch, few_steps):
    """Trials in this process, of two timed steps."""

    def refuse(model, batch):
        raise UnsupportedError("a test wants it so")

    monkeypatch.setattr(process, "TrialProcess", refuse)


@pytest.fixture
def unestimated(monkeypatch):
    """No estimate of memory, which takes a second."""
    monkeypatch.setattr(searching, "limits", lambda model, examples, largest, limit: Limits(largest, "a test", {}))
