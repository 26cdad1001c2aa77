"""docs/diagnosis.md names every cause that is tested, and its snippets run as they stand."""

import re

import pytest
from snippets import ROOT, run_snippets

from tfopt.diagnosis.candidates import APPLY, INPUT, PREFETCH

PAGE = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")


def test_every_cause_has_a_row():
    rows = set(re.findall(r"^\| `([^`]+)` \|", PAGE, re.M))
    code = (ROOT / "tfopt" / "diagnosis" / "candidates.py").read_text(encoding="utf-8")
    names = {*APPLY, INPUT, PREFETCH, *re.findall(r'^ +name="([^"]+)",$', code, re.M)}
    assert len(names) >= 11
    assert names | {"new shapes", "validation", "progress bar", "callback …", "callback …, between epochs"} <= rows


def test_links_lead_to_headings():
    for page, heading in re.findall(r"\]\(([\w.]*)(?:#([^)]+))?\)", PAGE):
        text = (ROOT / "docs" / (page or "diagnosis.md")).read_text(encoding="utf-8")
        headings = [
            re.sub(r"[^\w -]", "", line).strip().lower().replace(" ", "-")
            for line in re.findall("^#+ (.*)", text, re.M)
        ]
        assert not heading or heading in headings, heading


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("diagnosis.md", tmp_path)
    assert "the computation" in printed
    assert re.search(r"^(A step is now|Nothing was changed)", printed, re.M)
