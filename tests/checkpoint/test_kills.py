"""Checkpoints under kills and power losses: none that was saved is lost, and none is read that was not whole."""

import json
import shutil
from pathlib import Path

import killed_trainings
import pytest
import saved_trainings
from killed_trainings import in_process
from power_loss import Recorder
from shimmed_disk import shimmed

ROOT = Path(__file__).parents[2]


def kill(folder, *arguments):
    return in_process(killed_trainings.__file__, folder, *arguments)


@pytest.mark.parametrize(
    "every", [pytest.param(10, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.campaign)]
)
def test_a_kill_after_each_call_that_changes_the_disk(tmp_path, every):
    found = kill(tmp_path / "saved", "calls", every)
    assert found["kills"] == found["calls"] // every
    assert found["calls"] > 150
    kinds = {"open #", "write #", "fsync #", "replace #", "unlink #", "fsync blobs", "fsync saved", "mkdir blobs"}
    kinds |= {f"{call} step" for call in ("open", "write", "fsync", "replace", "unlink")}
    assert kinds <= {*found["kinds"]}


@pytest.mark.parametrize(
    "kills", [pytest.param(20, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.campaign)]
)
def test_a_kill_at_any_moment(tmp_path, kills):
    assert kill(tmp_path / "saved", "moments", kills)["kills"] >= kills


@pytest.mark.slow
@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.campaign)])
def test_a_power_loss_after_each_call_that_changes_the_disk(tmp_path, every):
    saved = [0]
    moments = []

    def look():
        moments.append(None)
        if len(moments) % every == 0:
            for how, seed in (("least", 0), ("names", 0), ("most", 0), ("any", len(moments)), ("any", -len(moments))):
                left = tmp_path / f"left-{len(moments)}-{how}"
                recorder.leave(left, how, seed)
                saved_trainings.expect_nothing_lost(left / "saved", saved[-1])
                if how == "any":  # and the training goes on
                    saved_trainings.train(left / "saved", range(saved[-1] + 1, saved_trainings.STEPS + 1))
                    saved_trainings.expect_no_leftovers(left / "saved")
                shutil.rmtree(left)

    root = tmp_path / "disk"
    root.mkdir()
    recorder = Recorder(root, look)
    with shimmed(root, recorder):
        saved_trainings.train(root / "saved", saved=saved.append)
    look()
    assert len(moments) > 150


def test_the_recorded_campaign_is_whole():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "checkpoint-kills-cpu.json").read_text(encoding="utf-8"))
    assert recorded["calls"]["kills"] == recorded["calls"]["calls"] > 150
    assert recorded["moments"]["kills"] >= 200
    assert recorded["lost"] == recorded["partly_read"] == 0
