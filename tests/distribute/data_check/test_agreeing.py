"""An error in one of two processes is one in both: neither waits for the other."""

import json

import pytest
from trained_apart import ended, start


@pytest.mark.slow
def test_an_error_in_one_worker_is_one_in_all(tmp_path):
    ended(start("agreeing_job.py", tmp_path, workers=2))
    other, own = (json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2))
    assert own["tfopt's"] == ["PipelineError", "planted"]
    assert other["tfopt's"][0] == "PipelineError"
    assert "Found in worker 1: PipelineError: planted" in other["tfopt's"][1]
    assert [own["another's"][0], other["another's"][0]] == ["ValueError", "ClusterError"]
    assert [own["state"][0], other["state"][0]] == ["TypeError", "ClusterError"]
    assert "Stateful.get_state" in other["state"][1]
    assert [own["vocabulary"][0], other["vocabulary"][0]] == ["CheckpointError"] * 2
    for each in (own, other):
        assert "the vocabulary of 'integer_lookup" in each["vocabulary"][1]
        assert each["none"] is each["after all"] is None
