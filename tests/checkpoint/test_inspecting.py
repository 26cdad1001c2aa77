import datetime
import json
import logging

import numpy as np
import pytest
import saved_trainings

from tfopt import checkpoint
from tfopt.checkpoint.folder.manifest import find_manifests
from tfopt.checkpoint.folder.store import Store
from tfopt.errors import CheckpointError


def test_what_is_available(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1_769_850_902.5)
    with Store(tmp_path, keep=5, best=("val_loss", "min")) as store:
        for step, loss in ((100, 0.51234567), (1200, 0.75)):
            metadata = {"epoch": step // 100, "metrics": {"val_loss": loss, "count": 3, "note": "x"}}
            store.write(step, {"value": np.zeros((512, 1024), "float32"), "same": np.zeros(3)}, metadata)
    newest, oldest = checkpoint.available(str(tmp_path))
    assert (newest.step, newest.best, oldest.step, oldest.best) == (1200, False, 100, True)
    assert newest.size_mib == pytest.approx(2, abs=1e-4)
    assert newest.metadata["epoch"] == 12
    assert newest.time == datetime.datetime(2026, 1, 31, 9, 15, 2, 500_000, datetime.UTC)
    assert str(newest) == "step 1,200, 2026-01-31 09:15:02 UTC, 2.0 MiB, val_loss 0.75"
    assert str(oldest) == "step 100, 2026-01-31 09:15:02 UTC, 2.0 MiB, val_loss 0.5123 (best)"
    assert repr(oldest).startswith("<SavedCheckpoint: step 100,")
    assert json.loads(json.dumps(oldest.to_dict()))["time"] == "2026-01-31T09:15:02.500000+00:00"


def test_no_best_and_no_metrics(tmp_path):
    with Store(tmp_path) as store:
        store.write(1, {})
        store.write(2, {}, {"metrics": "none"})
    assert [(each.best, str(each).count(",")) for each in checkpoint.available(tmp_path)] == [(False, 2), (False, 2)]


def test_nothing_is_available(tmp_path):
    assert checkpoint.available(tmp_path) == ()
    assert checkpoint.available(tmp_path / "none") == ()
    (tmp_path / "file").touch()
    for act in (checkpoint.available, checkpoint.verify):
        with pytest.raises(ValueError, match="which is a file"):
            act(tmp_path / "file")
        with pytest.raises(TypeError, match="Expected folder to be a path"):
            act(3)


def test_a_damaged_manifest_is_left_out_with_a_warning(trained, caplog):
    path = find_manifests(trained)[0].path
    path.write_text("{}")
    with caplog.at_level(logging.WARNING, "tfopt"):
        assert [each.step for each in checkpoint.available(trained)] == saved_trainings.kept_after(6)[1:]
    assert str(path) in caplog.text


def test_verify(trained):
    report = checkpoint.verify(trained)
    assert report.passed
    assert str(report) == "3 checkpoints: every checksum matches"
    assert str(checkpoint.verify(trained, 6)) == "1 checkpoint: every checksum matches"
    assert report.to_dict() == {"files": 3, "problems": [], "passed": True}


def test_verify_names_the_steps_that_share_a_damaged_file(trained):
    place = find_manifests(trained)[0].manifest.arrays["frozen/kernel"]
    path = trained / "blobs" / f"{place.blob}.safetensors"
    path.unlink()
    report = checkpoint.verify(trained)
    assert str(report) == f"3 checkpoints: 1 problem\n  missing: {path}: it is not there (steps 3, 5, 6)"
    assert not report.passed
    assert report.to_dict()["problems"][0]["kind"] == "missing"


def test_verify_refuses_what_is_not_there(trained, tmp_path):
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 99 in .*saved.* Found none"):
        checkpoint.verify(trained, 99)
    with pytest.raises(CheckpointError, match="Expected a checkpoint in"):
        checkpoint.verify(tmp_path / "none")
    with pytest.raises(ValueError, match="Expected step to be at least 0"):
        checkpoint.verify(trained, -1)
