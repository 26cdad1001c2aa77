"""The snippets of docs/distribution.md run as they stand, one after the other."""

from snippets import run_snippets


def test_the_snippets_run(tmp_path):
    printed = run_snippets("distribution.md", tmp_path)
    assert "one device: as without a strategy" in printed
    assert "worker 1 (127.0.0.1:2223) of 2 workers, from arguments\nFalse 1 2\none process" in printed
