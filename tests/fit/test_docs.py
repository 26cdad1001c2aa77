"""The snippets of docs/fit.md run as they stand, one after the other."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("fit.md", tmp_path).splitlines()
    assert sum("val_accuracy" in line for line in printed) == 2
    assert [line.split(":")[0] for line in printed if line[0].isdigit() and ": " in line][-5:] == [
        "0",
        "50",
        "100",
        "150",
        "200",
    ]
    assert printed[-1] == "372"
