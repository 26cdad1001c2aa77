"""benchmarks/precision_faults.py: that every training runs, and the recorded table."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import precision_faults
import pytest
from precision_faults import POLICIES, REMEDY, TRAININGS, markdown, one_training
from quick import first_quick

ROOT = Path(precision_faults.__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "precision-faults-cpu.json"


@pytest.mark.parametrize(
    "training", first_quick(TRAININGS, 0, every=len(TRAININGS)), ids=lambda training: training.name
)
def test_every_training_runs(training):
    saved = []
    found = one_training(replace(training, examples=512, epochs=2), 1, saved.append)
    assert found == saved[-1]
    assert {name: len(one) for name, one in found["accuracy"].items()} == dict.fromkeys((*POLICIES, REMEDY), 1)
    assert not found["check"]["passed"]
    assert found["remedy"]["passed"] or found["remedy"]["fallback"]


def test_the_recorded_run_is_whole_and_in_the_docs():
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert found["status"] == "complete"
    assert [training["name"] for training in found["trainings"]] == [training.name for training in TRAININGS]
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert markdown(found) in page
    words = " ".join(page.split())
    assert found["environment"]["host"]["cpu_model"] in words
    shares = [100 * share for share in found["monitor_cost"]["shares"]]
    assert max(shares) <= 1
    assert f"took {statistics.median(shares):.2f} % of the time" in words


def test_what_the_recorded_run_shows():
    for training in json.loads(RESULTS.read_text(encoding="utf-8"))["trainings"]:
        accuracy = {name: statistics.median(found) for name, found in training["accuracy"].items()}
        assert accuracy["mixed_bfloat16"] < accuracy["float32"] - 0.1, training["name"]
        assert accuracy[REMEDY] > accuracy["float32"] - 0.02, training["name"]
        assert not training["check"]["passed"], training["name"]
        assert training["monitor"]["warned"], training["name"]
