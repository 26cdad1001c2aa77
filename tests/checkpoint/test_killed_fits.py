"""Trainings with `fit` under kills: what was saved is never lost, and they end as if never killed, bit for bit."""

import json
from pathlib import Path

import killed_fits
import pytest
from killed_trainings import in_process

ROOT = Path(__file__).parents[2]


def kill(folder, *arguments):
    return in_process(killed_fits.__file__, folder, *arguments)


@pytest.mark.slow
def test_a_tenth_of_the_kills_after_calls_that_change_the_disk(tmp_path):
    found = kill(tmp_path, "calls", 10)
    assert all(of_kind["kills"] > 4 for of_kind in found.values())


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_kill_after_each_kind_of_call_that_changes_the_disk(tmp_path):
    found = kill(tmp_path, "calls", 1)
    for of_kind in found.values():
        assert of_kind["kills"] > 55
        assert {*killed_fits.AT_START, *killed_fits.IN_SAVES, "mkdir saved", "mkdir blobs"} == {*of_kind["after"]}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "kills", [pytest.param(5, marks=pytest.mark.slow), pytest.param(40, marks=pytest.mark.campaign)]
)
def test_a_kill_at_any_moment(tmp_path, kills):
    found = kill(tmp_path, "moments", kills)
    assert all(of_kind["kills"] >= kills for of_kind in found.values())


def test_the_recorded_campaign_is_whole():
    recorded = json.loads((ROOT / "benchmarks" / "results" / "checkpoint-kills-cpu.json").read_text(encoding="utf-8"))
    fits = recorded["fits"]
    assert fits["kills"] == sum(
        fits[which][kind]["kills"] for which in ("calls", "moments") for kind in killed_fits.KINDS
    )
    assert fits["kills"] >= 200
    assert recorded["lost"] == recorded["partly_read"] == fits["not_equal"] == 0
    ours, *others = recorded["in_saves"].values()
    assert ours["kills"] >= 12
    assert ours["lost"] == ours["partly_read"] == ours["not_equal"] == 0
    assert all(each["kills"] >= 12 for each in others)
