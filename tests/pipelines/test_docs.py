"""The snippets of docs/pipelines.md run as they stand, one after the other."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run(tmp_path, picture):
    for number in range(9):
        picture(tmp_path / "photos" / "train" / "abc"[number % 3] / f"{number}.png")
    printed = run_snippets("pipelines.md", tmp_path)
    for shown in (
        "Training pipeline over arrays",
        "[1.25 1.25 1.25 1.25 0.  ]",
        "0.526 of 0, 10 of 1",
        "[50, 50, 50, 50, 50, 50, 50, 50, 50, 50]",
        "asked for",
        "reads a variable",
        "NumPy",
    ):
        assert shown in printed
