"""What the end of `fit` waits for, and how long at most."""

import math
import subprocess
import sys
import threading

import pytest
from watched_fit import fit

from tfopt import callbacks as ours
from tfopt.callbacks.shared.background import Background


@pytest.fixture
def given(monkeypatch):
    """The seconds that threads and processes are given to end, by the callback at whose end it happens."""
    found, ending = {}, []

    def noted(kind, name):
        method = getattr(kind, name)

        def wait(self, seconds=math.inf, *arguments):
            if ending and threading.current_thread() is threading.main_thread():
                found.setdefault(ending[-1], []).append(seconds)
            return method(self, *([] if seconds == math.inf else [seconds]), *arguments)

        monkeypatch.setattr(kind, name, wait)

    for kind, name in ((threading.Thread, "join"), (subprocess.Popen, "wait")):
        noted(kind, name)
    for kind in (ours.PrometheusExporter, ours.CompilationLogger, ours.ReportWriter):
        on_train_end = kind.on_train_end

        def end(self, logs=None, on_train_end=on_train_end):
            ending.append(type(self).__name__)
            on_train_end(self, logs)
            ending.pop()

        monkeypatch.setattr(kind, "on_train_end", end)
    return found


def test_what_the_end_of_fit_waits_for_is_given_less_than_a_tenth_of_a_second(tmp_path, given):
    exporters = [ours.PrometheusExporter(tmp_path / "training.prom"), ours.PrometheusExporter(port=0)]
    fit(*exporters, ours.CompilationLogger(), ours.ReportWriter(tmp_path / "report.html"))
    # But the page, which is there when fit returns unless the disk hangs.
    assert given.pop("ReportWriter") == [30.0]
    assert (tmp_path / "report.html").exists()
    assert set(given) == {"PrometheusExporter"}
    assert len(given["PrometheusExporter"]) == 2
    assert max(given["PrometheusExporter"]) < 0.1


SCRIPT = """
import sys, time
from tfopt.callbacks.shared.background import Background

background = Background("work", lambda item: (time.sleep(0.5), print(item)))
background.put("done")
background.close(0.01, rest_at_exit=True)
"""


def test_what_is_late_is_done_before_python_ends():
    assert subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, timeout=300).stdout == b"done\n"


def test_what_python_waits_for_is_not_reported(caplog):
    released = threading.Event()
    background = Background("work", lambda item: released.wait(30))
    background.put("hangs")
    background.close(0.01, rest_at_exit=True)
    assert background._thread.is_alive()
    assert caplog.messages == []
    released.set()
