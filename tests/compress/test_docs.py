"""The snippets of docs/models-cheaper.md run as they stand."""

import pytest
from snippets import run_snippets


@pytest.mark.slow
def test_the_snippets_run_as_they_stand(tmp_path):
    printed = run_snippets("models-cheaper.md", tmp_path)
    assert "small_resnet at batch size 32 takes" in printed
    assert "a separable convolution" in printed
    assert "of the channels and heads of" in printed
    assert (tmp_path / "cost.html").exists()
