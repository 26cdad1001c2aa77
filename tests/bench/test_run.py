import itertools
import json
import os
import subprocess
import sys
import time

import planned_cases
import pytest

from tfopt.bench import run as run_module
from tfopt.bench import suites
from tfopt.bench.progress import Progress
from tfopt.bench.results import read
from tfopt.errors import ResultsError
from tfopt.measure import StepTimes, compare


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Runs cases of `planned_cases` in place of the suites', in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return lambda make: monkeypatch.setattr(run_module, "_cases", make)


def test_every_suite_runs_on_real_data(document):
    assert document["status"] == "complete"
    ran = [case["suite"] for case in document["cases"]]
    assert list(dict.fromkeys(ran)) == list(suites.SUMMARIES) == document["suites"]
    assert [case["error"] for case in document["cases"]] == [None] * len(ran)
    variants = {(case["suite"], case["workload"]): [v["name"] for v in case["variants"]] for case in document["cases"]}
    assert variants["precision", "digits"] == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert [len(names) for (suite, _), names in variants.items() if suite == "pipeline"] == [4, 2, 2, 3]


def test_every_variant_computes_the_same(document):
    cases = [case for case in document["cases"] if case["workload"] != "photos, by hand"]
    checks = {(case["suite"], v["name"]): v["check"] for case in cases for v in case["variants"]}
    assert checks.pop(("stack", "step alone")) is None  # trains nothing on
    assert {key: check["passed"] for key, check in checks.items()} == dict.fromkeys(checks, True)
    accuracies = checks["precision", "mixed_float16"]["values"]
    assert len(accuracies) == 1
    assert min(accuracies) >= 0.95


def test_every_figure_has_raw_samples_behind_it(document):
    for case in document["cases"]:
        measured = {v["name"]: StepTimes.from_dict(v["step_time"]) for v in case["variants"]}
        for v in case["variants"]:
            assert len(v["step_time"]["repeats_ms"]) == 2
            assert v["step_time"] == json.loads(json.dumps(measured[v["name"]].to_dict()))
            if v["name"] != case["baseline"]:
                expected = compare(measured[case["baseline"]], measured[v["name"]]).to_dict()
                assert v["comparison"] == json.loads(json.dumps(expected))


def test_the_environment_is_recorded(document):
    found = document["environment"]
    assert found["packages"]["tensorflow"].startswith("2.")
    assert found["host"]["cpus"] > 0
    assert isinstance(found["gpus"], list)
    assert "HOME" not in found["variables"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (planned_cases.second_raises, "RuntimeError: broken on purpose"),
        (planned_cases.second_is_killed, "was ended by signal 9"),
        (planned_cases.second_hangs, "Expected an answer within 5 s"),
    ],
)
def test_a_case_that_fails_is_a_row_and_the_others_go_on(planned, tmp_path, monkeypatch, make, error):
    monkeypatch.setenv("LIMIT", "5")
    planned(make)
    results = run_module.run([], tmp_path)
    one, two, three = results.document["cases"]
    assert one["error"] is None is three["error"]
    assert error in two["error"]
    assert results.document["status"] == "complete"
    assert read(results.path)["cases"][1]["variants"] == []


def test_an_interrupt_keeps_what_was_measured(planned, tmp_path, monkeypatch):
    def interrupted(self, variant):
        if "two" in self._case:
            raise KeyboardInterrupt

    planned(planned_cases.three)
    monkeypatch.setattr(Progress, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_module.run([], tmp_path)
    (path,) = tmp_path.iterdir()
    document = read(path)
    assert document["status"] == "interrupted"
    assert [c["suite"] for c in document["cases"]] == ["one"]


def test_a_budget_ends_the_run_between_cases_and_it_can_be_resumed(planned, tmp_path):
    planned(planned_cases.three)
    clock = itertools.count(0, 10)  # at the start, and before each case
    results = run_module.run([], tmp_path, budget_seconds=20, clock=lambda: next(clock))
    assert results.document["status"] == "out of budget"
    assert [c["suite"] for c in results.document["cases"]] == ["one", "two"]
    first = json.loads(results.path.read_text())
    resumed = run_module.run([], tmp_path, resume=True)
    assert resumed.path == results.path
    document = read(resumed.path)
    assert document["status"] == "complete"
    assert document["cases"][:2] == first["cases"]
    assert [c["suite"] for c in document["cases"]] == ["one", "two", "three"]
    with pytest.raises(ResultsError, match=r"Expected in .* a run that did not end\. Found none"):
        run_module.run([], tmp_path, resume=True)


KILLED = """
import planned_cases
from tfopt.bench import run
if __name__ == "__main__":
    run._cases = planned_cases.second_hangs
    run.run([], "results")
"""


def test_a_run_that_was_killed_is_resumed(planned, tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    due = time.monotonic() + 300
    while not (tmp_path / "pid").exists():
        assert killed.poll() is None
        assert time.monotonic() < due
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    (path,) = (tmp_path / "results").iterdir()
    before = read(path)
    assert (before["status"], len(before["cases"])) == ("running", 1)
    (tmp_path / "go").touch()
    planned(planned_cases.second_hangs)
    document = read(run_module.run([], tmp_path / "results", resume=True).path)
    assert document["cases"][0] == before["cases"][0]
    assert [(c["suite"], c["error"]) for c in document["cases"]] == [("one", None), ("two", None), ("three", None)]


def test_what_failed_is_measured_again(planned, tmp_path):
    planned(planned_cases.second_raises)
    path = run_module.run([], tmp_path).path
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"status": "interrupted"}))
    planned(planned_cases.three)
    assert [c["error"] for c in run_module.run([], tmp_path, resume=True).document["cases"]] == [None] * 3


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda document: document["environment"].update(driver="1.2.3"), "driver: 1.2.3 and None"),
        (lambda document: document.update(suites=["xla"]), "suites: xla and one, two, three"),
    ],
)
def test_another_machine_or_other_suites_are_not_resumed(planned, tmp_path, change, found):
    planned(planned_cases.three)
    path = run_module.run([], tmp_path, budget_seconds=1e-9).path
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=found):
        run_module.run([], tmp_path, resume=True)
    assert json.loads(path.read_text()) == document


def test_an_unknown_suite(tmp_path):
    with pytest.raises(ValueError, match=r"Received: 'precison'\. Did you mean 'precision'\?"):
        run_module.run(["xla", "precison"], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    import importlib

    from tfopt.bench.workloads import digits
    from tfopt.errors import UnsupportedError

    def missing(name):
        raise ImportError(name)

    digits.data.cache_clear()
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnsupportedError, match=r"Found no 'sklearn\.datasets'\. Run: pip install 'tfopt\[bench\]'"):
        digits.data()


@pytest.mark.slow
def test_the_list_for_a_gpu_runs_on_a_cpu_is_killed_and_goes_on(tmp_path):
    """The command itself, at the sizes of this machine."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tfopt.bench", "run", "gpu", "--output", "results", "--budget"]
    killed = subprocess.Popen([*command, "600"], cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL)
    due = time.monotonic() + 600
    while not any(read(path)["cases"] for path in tmp_path.glob("results/*.json") if path.stat().st_size):
        assert killed.poll() is None
        assert time.monotonic() < due
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    (path,) = tmp_path.glob("results/*.json")
    before = read(path)
    assert (before["status"], before["small"], before["suites"][:2]) == ("running", True, ["stack", "fit"])
    resumed = [*command, "60", "--resume"]
    assert subprocess.run(resumed, cwd=tmp_path, env=environ, capture_output=True, check=False).returncode == 0
    after = read(path)
    assert after["status"] == "out of budget"
    assert after["cases"][: len(before["cases"])] == before["cases"]
    assert len(after["cases"]) > len(before["cases"])
    report = [sys.executable, "-m", "tfopt.bench", "report", "results"]
    subprocess.run(report, cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert "Small sizes" in (tmp_path / "results" / "benchmarks.md").read_text()
