"""The README's figures are those of a recorded run, and its example runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tfopt.bench import results, table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TABLES = re.findall(r"<!-- table: (\S+) -->\n```\n(.*?)```\n<!-- end of table -->", README, re.S)


def test_there_is_a_table():
    assert len(TABLES) == 1


@pytest.mark.parametrize(("source", "shown"), TABLES)
def test_the_table_is_the_recorded_run(source, shown):
    document = results.read(ROOT / source)
    assert document["status"] == "complete"
    assert shown.rstrip("\n") == table.render(document)


def test_recorded_runs_name_no_place():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not re.search(r'"[^"]*(/home|/root|/Users|/tmp|/var)[^"]*"', path.read_text()), path


def test_the_examples_run(tmp_path):
    example, before_and_after, distributed = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(example.splitlines()) <= 25
    assert len(before_and_after.splitlines()) <= 5
    start = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import tfopt"
    subprocess.run(
        [sys.executable, "-c", "\n".join([start, distributed, example, before_and_after])],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    for name in ("utilization", "throughput"):
        assert (tmp_path / "logs" / f"{name}.csv").read_text().count("\n") > 1


def test_the_pictures_are_there():
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(pictures) == 1
    assert (ROOT / pictures[0]).is_file()


def test_the_two_commands_are_where_ci_finds_them():
    found = re.findall(r"^pip install '\.\[(bench|test)\]' && (.*)$", README, re.M)
    assert found == [("bench", "tfopt-bench"), ("test", "python -m pytest -n 2")]
