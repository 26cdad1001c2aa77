"""The parts of a campaign's step: processes with a limit, whose lines are on disk as they come."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from campaign.lines import Lines
from campaign.parts import Part, run
from gone import gone


@pytest.fixture
def lines(tmp_path):
    return Lines(tmp_path / "results" / "lines.jsonl")


def part(code, *, name="part", limit_seconds=60, **options):
    return Part(name=name, command=("-c", code), limit_seconds=limit_seconds, **options)


def go(parts, lines, *, seconds=60, **options):
    logs = lines.path.parent / "logs"
    return run(parts, lines, logs, deadline=time.monotonic() + seconds, environ=dict(os.environ), **options)


def test_lines_are_recorded_as_json_and_the_rest_is_logged(lines):
    code = """print('{"a": 1}'); print("words"); print('{"a": 2}'); import sys; print("to stderr", file=sys.stderr)"""
    assert go([part(code)], lines)
    begin, first, second, end = lines.read()
    assert begin["begun"]
    assert (first["a"], second["a"], first["part"]) == (1, 2, "part")
    assert (end["ended"], end["code"]) == ("done", 0)
    log = (lines.path.parent / "logs" / "part.txt").read_text()
    assert "words\n" in log
    assert "to stderr" in log  # perhaps inside a line: both streams go there as they come
    assert re.match(r"part: done, \d+ s; a=2", part(code).summary(lines.read()))


def test_what_is_done_is_not_run_again_and_what_failed_is(lines, tmp_path, capsys):
    fails_once = f"""
from pathlib import Path
mark = Path({str(tmp_path / "mark")!r})
if not mark.exists():
    mark.touch()
    raise SystemExit("it broke")
"""
    parts = [part("print('{}')", name="good"), part(fails_once, name="bad"), part("", name="last")]
    assert not go(parts, lines)
    assert [(record["part"], record["ended"]) for record in lines.read() if "ended" in record] == [
        ("good", "done"),
        ("bad", "failed"),
        ("last", "done"),
    ]
    assert "(it broke)" in parts[1].summary(lines.read())
    capsys.readouterr()
    assert go(parts, lines)
    assert capsys.readouterr().out.splitlines() == ["bad: at most 60 s"]
    assert go(parts, lines)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_part_that_hangs_is_killed_with_what_it_started(lines, tmp_path):
    hangs = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
print('{{"a": 1}}', flush=True)
time.sleep(600)
"""
    assert not go([part(hangs, limit_seconds=3), part("", name="next")], lines)
    _, measured, end, _, following = lines.read()
    assert (measured["a"], end["ended"], following["ended"]) == (1, "failed", "done")
    assert end["tail"].endswith("killed after 3 s")
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.slow
def test_at_the_deadline_a_part_is_cut_short_and_later_ones_are_not_begun(lines, capsys):
    parts = [part("import time; time.sleep(600)"), part("", name="next")]
    assert not go(parts, lines, seconds=6)
    *_, end = lines.read()
    assert end["ended"] == "cut short"
    assert "No time is left for next." in capsys.readouterr().out
    assert parts[1].summary(lines.read()) == "next: not run"


def test_parts_may_run_at_once(lines, tmp_path):
    """Each waits for the other; their outputs stay apart."""
    meet = f"""
import json, pathlib, sys, time
folder, (mine, other) = pathlib.Path({str(tmp_path)!r}), sys.argv[1:]
(folder / mine).touch()
while not (folder / other).exists():
    time.sleep(0.01)
print("words of", mine)
print(json.dumps({{"met": other}}))
"""
    pairs = (("first", "second"), ("second", "first"))
    parts = [Part(name=f"tests/{mine}", command=("-c", meet, mine, other), limit_seconds=60) for mine, other in pairs]
    assert go(parts, lines, at_once=2)
    assert {record["part"]: record["met"] for record in lines.read() if "met" in record} == {
        "tests/first": "second",
        "tests/second": "first",
    }
    assert "words of second" in (lines.path.parent / "logs" / "tests-second.txt").read_text()


def test_a_torn_line_loses_nothing_else(lines):
    lines.append(a=1)
    with open(lines.path, "a") as file:
        file.write('{"a": 2, "b')
    lines.append(a=3)
    assert [record["a"] for record in lines.read()] == [1, 3]
    assert lines.path.read_text().count("\n") == 3


def test_kill_9_of_the_campaign_keeps_what_was_measured_and_ends_the_part(lines, tmp_path):
    measures = """
import json, os, time
print(json.dumps({"pid": os.getpid()}), flush=True)
time.sleep(600)
"""
    campaign = f"""
import os, time
from pathlib import Path
from campaign.lines import Lines
from campaign.parts import Part, run
part = Part(name="part", command=("-c", {measures!r}), limit_seconds=600)
run([part], Lines(Path({str(lines.path)!r})), Path({str(tmp_path / "log")!r}), deadline=1e9, environ=dict(os.environ))
"""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", campaign], env=environ)
    try:
        wait_until(lambda: len(lines.read()) == 2)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    _, record = lines.read()
    assert gone(record["pid"])
    assert part("").summary(lines.read()) == f"part: interrupted; pid={record['pid']}"
    assert go([part("print('{}')")], lines)
    assert json.loads(lines.path.read_text().splitlines()[1])["pid"] == record["pid"]


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
