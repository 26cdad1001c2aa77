"""The snippets of docs/text.md run as they stand, one after the other, and print what their comments say."""

import re

import pytest
from snippets import ROOT, run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("text.md", tmp_path)
    page = (ROOT / "docs" / "text.md").read_text(encoding="utf-8")
    comments = re.findall(r"print\(.*\)  # (.*)", page)
    assert len(comments) == 7
    for comment in comments:
        assert comment in printed
