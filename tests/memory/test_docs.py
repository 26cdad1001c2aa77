"""The snippets of docs/memory.md run as they stand."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    assert run_snippets("memory.md", tmp_path).splitlines()[-1].startswith("128 ")
