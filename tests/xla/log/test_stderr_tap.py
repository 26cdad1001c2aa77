"""The tap in processes of its own: crashes, forks, floods. They load neither TensorFlow nor Keras."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from unittest import mock

import pytest

from tfopt.errors import UnsupportedError
from tfopt.xla.log.stderr_tap import StderrTap

ROOT = Path(__file__).parents[3]
LINE = "I0000 00:00:1795266330.181223   16901 xla_compiler.cc:820] XlaCompiler::CompileFunction f[]"
START = f"""
import os, signal, subprocess, sys, time
from tfopt.xla.log.stderr_tap import StderrTap
def log(text): os.write(2, text.encode() + b"\\n")
LINE = {LINE!r}
tap = StderrTap(hidden="", copy=False)
tap.on()
log("before")
log(LINE)
"""


def run(code, **options):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Python 3.12 warns of a fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", START + code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False, **options)


def test_the_lines_are_read_and_the_rest_comes_out():
    code = """
print(tap.lines() == [LINE], tap.lines())
log("in order")
log("I" * 100_000)
tap.off()
log("directly")
tap.on()
log(LINE)
print(tap.lines() == [LINE])
tap.close()
log("after")
"""
    done = run(code)
    assert done.stdout == "True []\nTrue\n"
    # What is written directly may overtake what the forwarder still has in hand, nothing else.
    assert done.stderr.count("I") == 100_000
    assert sorted(done.stderr.replace("I", "").split()) == ["after", "before", "directly", "in", "order"]


def test_last_words_without_a_line_break_come_out():
    assert run('os.write(2, b"Killed?"); os._exit(1)').stderr == "before\nKilled?"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.abort()", "os._exit(1)", "raise KeyError"])
def test_the_last_words_of_a_process_that_dies_come_out(end):
    done = run(f'log("last words"); {end}')
    assert done.returncode != 0
    assert done.stderr.startswith("before\nlast words\n")
    assert "xla_compiler" not in done.stderr


def test_more_than_a_pipe_holds_does_not_stop_the_process():
    """Nobody reads the lines meanwhile: one compilation of a large model reports hundreds of variables."""
    done = run("for _ in range(5000): log(LINE)\nprint(len(tap.lines())); tap.close()")
    assert done.stdout == "5001\n"
    assert done.stderr == "before\n"


def test_processes_that_are_started_or_forked_meanwhile_write_on():
    code = """
go, wait = os.pipe()
if os.fork() == 0:
    os.close(wait)
    os.read(go, 1)
    log("forked, after the end")
    os._exit(0)
subprocess.run(["sh", "-c", "echo started >&2"])
tap.lines()
tap.close()
log("after")
"""
    done = run(code)
    assert sorted(done.stderr.splitlines()) == sorted(["before", "started", "after", "forked, after the end"])


def test_ctrl_c_ends_the_process_and_not_its_last_words():
    code = """
signal.signal(signal.SIGINT, lambda *_: None)
os.killpg(0, signal.SIGINT)
log("last words")
print(len(tap.lines()))
"""
    done = run(code, start_new_session=True)
    assert (done.stdout, done.stderr) == ("1\n", "before\nlast words\n")


def test_a_forwarder_that_is_killed_ends_the_reading_not_the_process():
    done = run('tap._process.kill(); tap._process.wait(); print(tap.lines()[:0]); tap.close(); log("after")')
    assert done.returncode == 0
    assert done.stdout == "[]\n"
    assert done.stderr.endswith("after\n")


@pytest.mark.slow
def test_nobody_waits_for_a_forwarder_that_is_stopped():
    code = """
tap.lines()
for _ in range(3):
    os.kill(tap._process.pid, signal.SIGSTOP)
    log("x" * 3_000_000)  # more than the pipe holds
log(LINE)
print(len(tap.lines()), tap.has_lines())
tap.close()
log("after")
"""
    done = run(code)
    assert done.stdout == "1 False\n"
    assert done.stderr == "before\n" + 3 * ("x" * 3_000_000 + "\n") + "after\n"


def test_it_waits_once_for_a_forwarder_whose_output_nobody_reads():
    code = """
log("x" * 500_000)
log(LINE)
print(tap.lines(0.2) == [LINE])
sleeps, sleep = [], time.sleep
time.sleep = sleeps.append
print(tap.lines(), len(sleeps), flush=True)
time.sleep = sleep
sys.stdin.read()
while not tap.lines() == [LINE]:
    sleep(0.01)
log(LINE)
print(tap.lines() == [LINE])
tap.close()
"""
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", START + code], env=environ, text=True, **pipes) as process:
        said = [process.stdout.readline() for _ in range(2)]
        rest, text = process.communicate(timeout=60)
    assert (said, rest) == (["True\n", "[] 0\n"], "True\n")
    assert text == "before\n" + "x" * 500_000 + "\n"


def test_it_is_refused_where_there_is_no_standard_error_or_no_interpreter(monkeypatch):
    saved = os.dup(2)
    os.close(2)
    try:
        with pytest.raises(UnsupportedError, match=r"Expected an open standard error\. Found: .*Bad file"):
            StderrTap(hidden="", copy=False)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UnsupportedError, match=r"Expected to start a process\. Found: .*No such file"):
        StderrTap(hidden="", copy=False)
    monkeypatch.setattr(tempfile, "TemporaryFile", mock.Mock(side_effect=OSError("No space left on device")))
    with pytest.raises(UnsupportedError, match=r"Expected a temporary file\. Found: No space left"):
        StderrTap(hidden="", copy=False)
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(UnsupportedError, match="Expected a Python interpreter"):
        StderrTap(hidden="", copy=False)


def test_no_descriptor_stays_open(monkeypatch):
    def open_descriptors():
        return set(os.listdir("/proc/self/fd"))

    if not Path("/proc/self/fd").exists():
        pytest.skip("no /proc here")
    before, handler = open_descriptors(), signal.getsignal(signal.SIGINT)
    tap = StderrTap(hidden="", copy=False)
    tap.on()
    tap.close()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UnsupportedError):
        StderrTap(hidden="", copy=False)
    monkeypatch.setattr(os, "pipe", mock.Mock(side_effect=OSError("Too many open files")))
    with pytest.raises(UnsupportedError, match="Too many open files"):
        StderrTap(hidden="", copy=False)
    assert open_descriptors() == before
    for thread in threading.enumerate():
        if thread.name == "tfopt-forwarder":
            thread.join(60)
    assert tap._process.returncode == 0
    assert signal.getsignal(signal.SIGINT) is handler
