"""A function in a process of its own: what comes back, and what does not."""

import os
import subprocess
import sys
import time
from pathlib import Path

import isolated_jobs
import pytest
from gone import gone

from tfopt.bench import isolated
from tfopt.bench.isolated import ProcessError

INTERRUPTED = """
import isolated_jobs
from tfopt.bench import isolated
if __name__ == "__main__":
    isolated.call(isolated_jobs.sleep, 600, seconds=600, on_message=lambda pid: print(pid, flush=True))
"""


@pytest.mark.slow
def test_messages_and_what_it_returns():
    said = []
    assert isolated.call(isolated_jobs.add, 2, 3, seconds=300, on_message=said.append) == 5
    assert said == [2, 3]


@pytest.mark.slow
def test_a_message_is_handled_before_the_process_goes_on(tmp_path):
    """Or writing a turn to disk would disturb the next one."""

    def slowly(path):
        time.sleep(0.5)
        Path(path).touch()

    assert isolated.call(isolated_jobs.sees, str(tmp_path / "seen"), seconds=300, on_message=slowly)


@pytest.mark.slow
def test_it_has_the_variables_and_the_folder_of_now(monkeypatch, tmp_path, capfd):
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setenv("TFOPT_TEST", str(number))
        monkeypatch.chdir(folder)
        value, where, pid = isolated.call(isolated_jobs.surroundings, seconds=300)
        assert (value, where) == (str(number), str(folder))
        assert pid != os.getpid()
        assert gone(pid)
    assert "not for standard output" not in capfd.readouterr().out


@pytest.mark.slow
def test_what_it_raises(capfd):
    with pytest.raises(ValueError, match="wrong value"):
        isolated.call(isolated_jobs.value_error, seconds=300)
    with pytest.raises(RuntimeError, match="TwoArgumentsError: one and two"):
        isolated.call(isolated_jobs.no_pickle, seconds=300)


def test_lines_are_handed_over_as_they_come_and_remarks_of_tensorflow_are_not(monkeypatch):
    seen = []
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    isolated.call(isolated_jobs.writes, seconds=300, on_line=seen.append)
    assert seen == ["UserWarning: mine", "from a child", "the last line"]
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    seen.clear()
    isolated.call(isolated_jobs.writes, seconds=300, on_line=seen.append)
    assert len(seen) == 6


@pytest.mark.slow
def test_one_that_writes_for_ever_is_ended_too():
    with pytest.raises(ProcessError, match="within 2 s"):
        isolated.call(isolated_jobs.write_for_ever, seconds=2, on_line=lambda line: None)


@pytest.mark.parametrize(("how", "found"), [("exit", "ended with code 7"), ("kill", "was ended by signal 9")])
def test_one_that_ends_without_an_answer(how, found):
    with pytest.raises(ProcessError, match=found):
        isolated.call(isolated_jobs.end, how, seconds=300)


@pytest.mark.slow
def test_one_that_takes_too_long_is_ended():
    pids = []
    with pytest.raises(ProcessError, match="within 2 s"):
        isolated.call(isolated_jobs.sleep, 600, seconds=2, on_message=pids.append)
    assert gone(pids[0])


@pytest.mark.slow
def test_it_dies_with_the_process_that_waits(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    waiting = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environ)
    with waiting:
        pid = int(waiting.stdout.readline())
        waiting.kill()
    assert gone(pid)
