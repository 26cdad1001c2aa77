"""The snippets of docs/batch.md run as they stand."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    assert "Batch size " in run_snippets("batch.md", tmp_path)
    assert "Throughput" in (tmp_path / "batch.html").read_text(encoding="utf-8")
