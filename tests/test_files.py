import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import closing

import pytest

from tfopt.files import LineAppender, write_atomic


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_atomic(path, "first")
    write_atomic(path, "zweite ✓")
    assert path.read_text(encoding="utf-8") == "zweite ✓"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_the_umask_of_the_process_is_left_alone(tmp_path, monkeypatch):
    """Setting it, if only to read it, gives files that other threads make meanwhile the wrong mode."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "umask", lambda mask: pytest.fail("the umask was set"))
        write_atomic(tmp_path / "file.txt", "text")
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "other.txt", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "other.txt").stat().st_mode & 0o777 == 0o640


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_atomic(path, "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            write_atomic(path, "x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys
from tfopt.files import LineAppender
log = LineAppender(sys.argv[1])
number = 0
while True:
    log.append(f"{number}" + "x" * 5000)
    number += 1
"""


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    path = tmp_path / "log"
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    while not path.exists() or path.stat().st_size < 100_000:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with closing(LineAppender(path)) as log:
        log.append("end")
    lines = path.read_text().splitlines()
    assert lines[:-1] == [f"{number}" + "x" * 5000 for number in range(len(lines) - 1)]
    assert lines[-1] == "end"


@pytest.mark.parametrize("content", ["", "a\n", "a\nb", "b", "a\n" + "x" * 200_000, "é\nü"])
def test_a_part_of_a_line_is_cut_off(tmp_path, content):
    path = tmp_path / "log"
    path.write_text(content)
    with closing(LineAppender(path)) as log:
        whole = content[: content.rfind("\n") + 1]
        assert log.size == len(whole.encode())
        log.append("new")
    assert path.read_text() == whole + "new\n"


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
    with closing(LineAppender(tmp_path / "log")):
        program = f"from tfopt.files import LineAppender; LineAppender({str(tmp_path / 'log')!r})"
        process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert "BlockingIOError" in process.stderr
        with pytest.raises(BlockingIOError, match="another process, or another callback of this one, writes to it"):
            LineAppender(tmp_path / "log")
    LineAppender(tmp_path / "log").close()


def test_closing_twice(tmp_path):
    log = LineAppender(tmp_path / "log")
    log.close()
    log.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.append("late")
