"""Fixtures for tests that save checkpoints."""

import os

import pytest

from tfopt.warn import forget_warnings


@pytest.fixture
def fresh_warnings():
    """Each test gets the warnings that are given once."""
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture
def disk_that_syncs_at_once(monkeypatch):
    """Waiting for a real disk would take most of the time, and no test cuts its power."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
