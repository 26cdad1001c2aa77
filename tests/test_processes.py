"""Children: what is said, how they end, and that none is left."""

import os
import signal
import subprocess
import sys
import time

import child_jobs
import pytest
from gone import gone

from tfopt.processes import Child, describe_end, die_with, exit_code, limit, python_path, signal_group

STARTS = """
import child_jobs
from tfopt.processes import Child
with Child(child_jobs.sleeps) as child:
    child.connection.recv()
    try:
        print(child.process.pid, flush=True)
        child.connection.recv()
    except KeyboardInterrupt:
        print(child.process.poll())
        raise SystemExit(5)
"""


@pytest.fixture
def start():
    """Starts children that are gone afterwards."""
    children = []

    def start(function, **options):
        children.append(Child(function, **options))
        return children[-1]

    yield start
    for child in children:
        child.close()
        assert gone(child.process.pid)


def test_messages_of_any_size(start):
    connection = start(child_jobs.echo).connection
    for message in ({"a": (1, 2)}, b"x" * 1_000_000):
        connection.send(message)
        assert connection.recv() == message


def test_what_it_finds(start, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path / "own")
    (tmp_path / "child_jobs.py").write_text("raise ValueError('of the working directory')")
    monkeypatch.chdir(tmp_path)
    child = start(child_jobs.looks_around, environ=os.environ | {"TFOPT_TEST": "a value"})
    value, paths, typed, leads_a_session = child.connection.recv()
    assert (value, typed, leads_a_session) == ("a value", "", True)
    assert paths[0] == str(tmp_path / "own")


def test_an_empty_path_is_the_working_directory(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["", "/other"])
    monkeypatch.chdir(tmp_path)
    assert python_path() == f"{tmp_path}{os.pathsep}/other"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("raise", 1, "ended with code 1"), (7, 7, "ended with code 7"), ("kill", -9, "was ended by signal 9")],
)
def test_its_end(start, how, code, said):
    child = start(child_jobs.ends)
    assert exit_code(child.process, wait=False) is None
    child.connection.send(how)
    with pytest.raises((EOFError, ConnectionError)):
        child.connection.recv()
    assert exit_code(child.process) == exit_code(child.process, wait=False) == code
    assert describe_end(code) == said
    assert child.last_words().endswith("ZeroDivisionError: of its own making") == (how == "raise")


def test_where_the_ends_of_children_are_ignored(start):
    child = start(child_jobs.ends)
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        child.connection.send(7)
        assert exit_code(child.process) == 0  # as subprocess says where nothing is known
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_more_output_than_a_pipe_holds_and_no_utf8(start):
    child = start(child_jobs.writes)
    for written in (b"x" * 200_000, b" y \xff\n"):
        child.connection.send(written)
        child.connection.recv()
        child.last_words()
    assert child.last_words(most=6) == "x y \N{REPLACEMENT CHARACTER}"
    assert len(child.last_words(most=300_000)) == 200_004


def test_both_outputs_in_order(start):
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    child = start(child_jobs.writes_both, environ=environ)
    child.connection.recv()
    assert child.last_words() == "first\nsecond\nthird"


def test_at_the_limit_it_ends_with_what_holds_its_connection(start):
    child = start(child_jobs.starts_others)
    pids = child.connection.recv()
    with limit(child.process, 0.5) as late, pytest.raises((EOFError, ConnectionError)):
        child.connection.recv()
    assert late.is_set()
    assert exit_code(child.process) == -signal.SIGKILL
    assert all(map(gone, pids))


def test_the_limit_holds_for_a_message_that_nobody_reads(start):
    child = start(child_jobs.sleeps)
    with limit(child.process, 0.5), pytest.raises(ConnectionError):
        child.connection.send(b"x" * 10_000_000)


def test_in_time_nothing_is_killed(start):
    child = start(child_jobs.echo)
    with limit(child.process, 0.3) as late:
        pass
    time.sleep(0.6)
    assert not late.is_set()
    child.connection.send("still there")
    assert child.connection.recv() == "still there"


def test_what_it_leaves_in_its_group_is_killed(start):
    child = start(child_jobs.starts_others)
    pids = child.connection.recv()
    child.connection.send("end")
    assert exit_code(child.process) == 3
    assert all(map(gone, pids))


def test_it_is_closed_with_its_group(start):
    child = start(child_jobs.starts_others)
    pids = child.connection.recv()
    child.close()
    assert all(map(gone, pids))


def test_the_number_of_one_that_has_ended_is_let_alone(start, monkeypatch):
    child = start(child_jobs.ends)
    child.connection.send(7)
    exit_code(child.process)
    monkeypatch.setattr(os, "killpg", lambda *given: pytest.fail("it may be another's"))
    signal_group(child.process, signal.SIGKILL)
    child.close()


@pytest.fixture
def parent():
    """A process that waits for its child, and the child's number."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STARTS]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ, start_new_session=True) as waiting:
        yield waiting, int(waiting.stdout.readline())


def test_it_dies_with_its_parent(parent):
    waiting, pid = parent
    waiting.kill()
    assert gone(pid)


def test_ctrl_c_reaches_only_the_parent_which_ends_it(parent):
    waiting, pid = parent
    os.killpg(waiting.pid, signal.SIGINT)
    assert waiting.stdout.read() == "None\n"
    assert waiting.wait() == 5
    assert gone(pid)


def test_one_whose_parent_is_gone_already_ends():
    process = os.fork()
    if not process:
        die_with(os.getpid())  # not its parent
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
