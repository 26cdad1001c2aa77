"""The snippets of docs/kernels.md run as they stand, one after the other."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("kernels.md", tmp_path)
    assert printed.startswith("1\nmulti_head_attention: plain (")
    assert "\n1\nsequential/batch_normalization: training fused batch norm;" in printed
    assert ": training chunked cross-entropy;" in printed
