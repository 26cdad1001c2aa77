"""benchmarks/precision_verdicts.py: that it goes on where it stopped, and the recorded run."""

import json
import sys
from pathlib import Path

import precision_verdicts
import pytest
from precision_matrix.cases import ALL
from precision_matrix.judged import DISPUTED
from precision_verdicts import main, sentences

ROOT = Path(precision_verdicts.__file__).parents[1]
RECORD = json.loads((ROOT / "benchmarks" / "results" / "precision-matrix-cpu.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_it_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path = tmp_path / "verdicts.json"

    def recorded(*options):
        monkeypatch.setattr(sys, "argv", ["precision_verdicts.py", str(path), *options])
        main()
        return json.loads(path.read_text(encoding="utf-8"))

    monkeypatch.setattr(
        precision_verdicts,
        "ALL",
        [one for one in ALL if one.id in ("accumulating, bfloat16", "NaN in the data, float16")],
    )
    begun = recorded("--only", "accumulating, bfloat16")
    ended = recorded()
    assert (begun["status"], ended["status"]) == ("running", "complete")
    assert begun["cases"] == ended["cases"][:1]
    assert [(one["verdict"], one["outcome"]) for one in ended["cases"]] == [("pass", "right"), ("refuse", "right")]


def test_the_recorded_run_is_whole_and_in_the_docs():
    assert RECORD["status"] == "complete"
    assert RECORD["environment"]["packages"]["keras-hub"]
    assert [one["case"] for one in RECORD["cases"]] == [case.id for case in ALL]
    for one, case in zip(RECORD["cases"], ALL, strict=True):
        assert case.verdict in (one["expected"], "by ids"), case.id
    page = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
    assert sentences(RECORD) in " ".join(page.split())


def test_only_what_is_disputed_is_wrong_in_the_recorded_run():
    wrong = {one["case"]: one["outcome"] for one in RECORD["cases"] if one["outcome"] != "right"}
    assert wrong.items() <= dict.fromkeys(DISPUTED, "wrong refusal").items()
