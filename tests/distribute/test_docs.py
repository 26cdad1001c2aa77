"""The snippets of docs/distribution.md and docs/clusters.md run as they stand, one after the other."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path):
    printed = run_snippets("distribution.md", tmp_path)
    assert "one device: as without a strategy" in printed
    assert "worker 1 (127.0.0.1:2223) of 2 workers, from arguments\nFalse 1 2\none process" in printed


def test_the_snippets_for_clusters_run(tmp_path):
    assert "worker 6 (set-w-1-2.set:2222) of 8 workers, from Kubernetes\n" in run_snippets("clusters.md", tmp_path)
