"""The snippets of docs/records.md run as they stand, one after the other."""

from snippets import run_snippets


def test_the_snippets_run(tmp_path, picture):
    for number in range(6):
        picture(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
    printed = run_snippets("records.md", tmp_path)
    for shown in ("6 ('a', 'b')", "4 files of records: as the index says", "keeps 999 records", "999 "):
        assert shown in printed
