import os

import pytest
import saved_trainings

from tfopt.warn import forget_warnings


@pytest.fixture(autouse=True)
def _fresh_warnings():
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture(autouse=True)
def _disk_that_syncs_at_once(monkeypatch):
    """Waiting for a real disk would take most of the time, and no test cuts its power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture
def trained(tmp_path):
    """The folder of a training that has ended: it holds its last checkpoints, and the best."""
    saved_trainings.train(tmp_path / "saved")
    return tmp_path / "saved"
