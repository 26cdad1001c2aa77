import asyncio
import threading

import pytest

from tfopt.callbacks.background import Background
from tfopt.hardware import warn


@pytest.fixture(autouse=True)
def _forgotten_warnings():
    warn.forget_warnings()


def test_items_in_order_in_another_thread():
    taken = []
    background = Background("some work", lambda item: taken.append((item, threading.current_thread().name)))
    for item in range(5):
        background.put(item)
    background.close()
    assert taken == [(item, "tfopt-some-work") for item in range(5)]


def test_closed_it_takes_no_more():
    taken = []
    background = Background("work", taken.append)
    background.close()
    background.close()
    for _ in range(20):
        background.put("late")
    assert (taken, background.closed, background.dropped) == ([], True, 0)


def test_what_does_not_fit_is_dropped_and_counted(caplog):
    released, begun, taken = threading.Event(), threading.Event(), []

    def work(item):
        begun.set()
        released.wait(30)
        taken.append(item)

    background = Background("work", work, most=2)
    background.put("first")
    assert begun.wait(30)
    for item in range(5):
        background.put(item)
    released.set()
    background.close()
    assert (taken, background.dropped) == (["first", 0, 1], 3)
    assert caplog.messages == [
        "Expected the work to keep up. Found 2 items waiting for it. What does not fit is dropped; the training goes "
        "on. Look whether it hangs, or ask for less."
    ]


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_an_error_is_reported_once_and_work_goes_on(caplog, error):
    taken = []

    def work(item):
        if item < 2:
            raise error("no")
        taken.append(item)

    background = Background("work", work)
    for item in range(3):
        background.put(item)
    background.close()
    assert taken == [2]
    assert caplog.messages == [f"Expected the work to work. Found: {error('no')!r}. The training goes on."]


def test_one_that_hangs_is_not_waited_for(caplog):
    released = threading.Event()
    background = Background("work", lambda item: released.wait(30))
    background.put("hangs")
    background.close(0.01)
    assert caplog.messages == [
        "Expected the work to be done within 0.01 s. Found it at work still, and it is waited for no longer. Look "
        "whether it hangs."
    ]
    released.set()


def test_it_may_be_closed_in_its_own_thread(caplog):
    """As the garbage collection does, wherever it runs."""
    background = Background("work", lambda item: background.close())
    background.put("closes")
    background._thread.join(30)
    assert not background._thread.is_alive()
    assert caplog.messages == []
