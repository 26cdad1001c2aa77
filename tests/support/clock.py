"""A clock that stands still until a test moves it, and how tfopt's modules read a test's clock."""

import sys
import time
from types import SimpleNamespace

import pytest


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self, now=1000.0):
        self.now = now

    def __call__(self):
        return self.now


@pytest.fixture
def set_clock(monkeypatch):
    """Has the modules of classes and functions read a clock, and `wall` for the seconds since 1970."""

    def put(clock, *of, wall=None):
        read = {"monotonic": clock, "perf_counter": clock, "time": wall or time.time}
        for one in of:
            monkeypatch.setattr(sys.modules[one.__module__], "time", SimpleNamespace(**vars(time) | read))

    return put
