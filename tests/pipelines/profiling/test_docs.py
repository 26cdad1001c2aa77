"""The snippet of docs/profiling.md runs as it stands."""

import pytest
from snippets import ROOT, run_snippets


@pytest.mark.slow
def test_the_snippet_runs(tmp_path):
    printed = run_snippets("profiling.md", tmp_path)
    assert printed.splitlines()[-1] == "transform"
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    for column in ("ms/example", "at once", "busy", "without it"):
        assert f"`{column}`" in text
        assert column in printed
