"""The snippets of the documentation run as they stand, one after the other, and print what it says."""

import re

import pytest
from snippets import ROOT, run_snippets

pytestmark = pytest.mark.slow


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_pipelines(tmp_path, picture):
    for number in range(9):
        picture(tmp_path / "photos" / "train" / "abc"[number % 3] / f"{number}.png")
    printed = run_snippets("pipelines.md", tmp_path)
    for shown in (
        "Training pipeline over arrays",
        "[1.25 1.25 1.25 1.25 0.  ]",
        "0.526 of 0, 10 of 1",
        "[50, 50, 50, 50, 50, 50, 50, 50, 50, 50]",
        "asked for",
        "reads a variable",
        "NumPy",
    ):
        assert shown in printed


def test_profiling(tmp_path):
    printed = run_snippets("profiling.md", tmp_path)
    assert printed.splitlines()[-1] == "transform"
    for column in ("ms/example", "at once", "busy", "without it"):
        assert f"`{column}`" in page("profiling.md")
        assert column in printed


def test_text(tmp_path):
    printed = run_snippets("text.md", tmp_path)
    comments = re.findall(r"print\(.*\)  # (.*)", page("text.md"))
    assert len(comments) == 7
    for comment in comments:
        assert comment in printed
