import json

import pytest

from tfopt.bench import run as run_module
from tfopt.bench import suites
from tfopt.bench.cases import Case, Variant
from tfopt.bench.results import read
from tfopt.measure import StepTimes, compare


def times(ms):
    return StepTimes(repeats_ms=((ms, ms),), steps_per_sample=1, first_step_seconds=1.0)


def case(name, timer=lambda stack: lambda: times(1.0)):
    variants = [Variant(name=n, note="", timer=timer) for n in ("a", "b")]
    return Case(suite=name, workload="w", question="?", unit="step", variants=variants, repeats=2)


@pytest.fixture
def planned(monkeypatch):
    """Runs the given cases in place of the suites'."""

    def plan(*cases):
        class Suite:
            @staticmethod
            def cases(scale):
                return cases

        monkeypatch.setattr(suites, "load", lambda names: [Suite])

    return plan


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
    assert {key: check["passed"] for key, check in checks.items()} == dict.fromkeys(checks, True)
    accuracies = checks["precision", "mixed_float16"]["values"]
    assert len(accuracies) == 1
    assert min(accuracies) >= 0.95


def test_every_figure_has_raw_samples_behind_it(document):
    doubled = [("pipeline", "photos, by hand"), ("fit", "mlp, tiny")]
    for case in document["cases"]:
        measured = {v["name"]: StepTimes.from_dict(v["step_time"]) for v in case["variants"]}
        repeats = 12 if (case["suite"], case["workload"]) in doubled else 6
        for v in case["variants"]:
            assert len(v["step_time"]["repeats_ms"]) == repeats
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


def test_a_case_that_fails_is_a_row_and_the_others_go_on(planned, tmp_path, capsys):
    def broken(stack):
        raise RuntimeError("broken on purpose")

    planned(case("one"), case("two", broken), case("three"))
    results = run_module.run([], tmp_path)
    assert [c["error"] for c in results.document["cases"]] == [None, "RuntimeError: broken on purpose", None]
    assert results.document["status"] == "complete"
    assert "Traceback" in capsys.readouterr().err
    assert read(results.path)["cases"][1]["variants"] == []


def test_an_interrupt_keeps_what_was_measured(planned, tmp_path):
    def interrupted(stack):
        raise KeyboardInterrupt

    planned(case("one"), case("two", interrupted), case("three"))
    with pytest.raises(KeyboardInterrupt):
        run_module.run([], tmp_path)
    (path,) = tmp_path.iterdir()
    document = read(path)
    assert document["status"] == "interrupted"
    assert [c["suite"] for c in document["cases"]] == ["one"]


def test_a_budget_ends_the_run_between_cases(planned, tmp_path):
    now = [0.0]

    def slow(stack):
        now[0] += 10
        return lambda: times(1.0)

    planned(*(case(name, slow) for name in ("one", "two", "three")))
    results = run_module.run([], tmp_path, budget_seconds=30, clock=lambda: now[0])
    assert results.document["status"] == "out of budget"
    assert [c["suite"] for c in results.document["cases"]] == ["one", "two"]


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
