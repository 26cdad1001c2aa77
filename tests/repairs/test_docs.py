"""The snippet of docs/repairs.md runs as it stands."""

import re

import pytest
from snippets import ROOT, run_snippets

from tfopt import repairs


@pytest.mark.slow
def test_the_snippet_runs(tmp_path):
    assert run_snippets("repairs.md", tmp_path).count("repaired") == len(repairs.status().states)


def test_every_repair_is_on_the_page():
    text = (ROOT / "docs" / "repairs.md").read_text(encoding="utf-8")
    for name in repairs.status().states:
        assert re.search(rf"^(\| D\d+ \|.*\| |- )`{name}`", text, re.M), name


def test_every_defect_cited_in_the_code_is_in_the_legend():
    text = (ROOT / "docs" / "repairs.md").read_text(encoding="utf-8")
    listed = [int(number) for number in re.findall(r"^\| D(\d+) \|", text, re.M)]
    assert listed == sorted(set(listed))
    assert set(range(1, 24)) <= set(listed)
    for file in (ROOT / "tfopt" / "repairs").glob("*.py"):
        for cited in file.read_text(encoding="utf-8").split('"""')[1].splitlines():
            named = re.search(r"\bD\d+, `(\w+)`:", cited)
            repair = named[1] if named else file.stem
            for defect in re.findall(r"\bD\d+\b", cited):
                (line,) = (line for line in text.splitlines() if line.startswith(f"| {defect} |"))
                assert f"`{repair}`" in line, (defect, repair)
