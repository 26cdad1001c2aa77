"""benchmarks/defects.py: its figures have the recorded verdicts, of the defects in docs/repairs.md."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import defect_cases
import defects
import pytest
from defect_cases import STOCK, TFOPT, Case

ROOT = Path(defect_cases.__file__).parents[2]
PAGE = (ROOT / "docs" / "repairs.md").read_text(encoding="utf-8")
RECORDED = json.loads((ROOT / "benchmarks" / "results" / "defects-cpu.json").read_text(encoding="utf-8"))
FEW = random.Random(0).sample(range(len(defects.CASES)), 5)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=pytest.mark.slow if number in FEW else pytest.mark.campaign, id=case.figure)
        for number, case in enumerate(defects.CASES)
    ],
)
def test_a_figure_has_the_recorded_verdict(number):
    found, recorded = defects.both(defects.CASES[number]), RECORDED["cases"][number]
    assert found["figure"] == recorded["figure"]
    for way in (STOCK, TFOPT):
        if recorded[way] is None:
            assert found[way] is None
        else:
            assert found[way]["verdict"] == recorded[way]["verdict"], found[way]


def test_the_recorded_run_is_whole_and_of_the_defects_in_the_docs():
    assert RECORDED["status"] == "complete"
    keys = ("defect", "figure", "right", "tolerance")
    assert [[one[key] for key in keys] for one in RECORDED["cases"]] == [
        [getattr(case, key) for key in keys] for case in defects.CASES
    ]
    assert {case["defect"] for case in RECORDED["cases"]} == set(re.findall(r"^\| (D\d+) \|", PAGE, re.M))


def test_nothing_fails_and_with_tfopt_nothing_is_wrong():
    for case in RECORDED["cases"]:
        assert case[STOCK]["verdict"] in ("right", "wrong"), case
        assert case[TFOPT] is None or case[TFOPT]["verdict"] in ("right", "refused"), case


@pytest.mark.slow
def test_the_script_measures_writes_and_stops(tmp_path):
    results = tmp_path / "results.json"
    script = [sys.executable, defects.__file__, results]
    for options, status, measured in (["--defect", "D18"], "complete", 1), (["--budget", "0"], "out of budget", 0):
        subprocess.run([*script, *options], check=True, capture_output=True)
        found = json.loads(results.read_text())
        assert (found["status"], len(found["cases"])) == (status, measured)
        assert found["environment"]["packages"]["keras"]


def no_number(with_tfopt, folder):
    raise RuntimeError("it broke")


def refused(with_tfopt, folder):
    raise defect_cases.RefusedError(f"not in {folder}")


@pytest.mark.parametrize(
    ("measure", "found"),
    [
        (lambda with_tfopt, folder: 1.01, {"verdict": "right", "value": 1.01}),
        (lambda with_tfopt, folder: 1.2, {"verdict": "wrong", "value": 1.2}),
        (lambda with_tfopt, folder: float("nan"), {"verdict": "wrong"}),
        (lambda with_tfopt, folder: "none", {"verdict": "wrong", "value": "none"}),
        (no_number, {"verdict": "failed", "message": "RuntimeError: it broke"}),
        (refused, {"verdict": "refused", "message": "not in FOLDER"}),
    ],
)
def test_verdicts(tmp_path, measure, found):
    case = Case("D1", "figure", 1.0, measure, 0.05)
    assert found.items() <= defect_cases.run(None, case, False, tmp_path).items()
    assert defect_cases.run(None, case, True, tmp_path)["verdict"] == found["verdict"]


def test_stock_with_a_repair_is_no_stock(tmp_path):
    def measure(with_tfopt, folder):
        defect_cases.repairs.install("clear_session")
        return 1

    case = Case("D1", "figure", 1, measure)
    assert defect_cases.run(None, case, True, tmp_path)["verdict"] == "right"
    with pytest.raises(AssertionError, match="should be stock"):
        defect_cases.run(None, case, False, tmp_path)
