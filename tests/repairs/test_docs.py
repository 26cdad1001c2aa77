"""The snippet of docs/repairs.md runs as it stands."""

from snippets import ROOT, run_snippets

from tfopt import repairs


def test_the_snippet_runs(tmp_path):
    assert run_snippets("repairs.md", tmp_path).count("repaired") == len(repairs.status().states)


def test_every_repair_is_in_the_table():
    text = (ROOT / "docs" / "repairs.md").read_text(encoding="utf-8")
    for name in repairs.status().states:
        assert f"| `{name}` |" in text
