import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import planned_cases
import pytest
from quick import campaign, first_quick

from tfopt.bench import report, suites
from tfopt.bench import run as run_module
from tfopt.bench.report import formatting
from tfopt.bench.results import NEVER_BEGAN, UNDER_WAY, CaseResult, VariantResult
from tfopt.bench.results.run_file import RunFile, read
from tfopt.errors import ResultsError, UnsupportedError
from tfopt.measure import StepTimes, compare


@pytest.fixture
def planned(monkeypatch, tmp_path):
    """Runs cases of `planned_cases` in place of the suites', in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return lambda make: monkeypatch.setattr(run_module, "_cases", make)


@pytest.mark.campaign
def test_every_suite_runs_on_real_data(fresh):
    recorded_run = read(fresh.path)
    assert recorded_run.status == "complete"
    ran = [case.suite for case in recorded_run.cases]
    assert tuple(dict.fromkeys(ran)) == tuple(suites.expand([])) == recorded_run.suites
    assert [case.error for case in recorded_run.cases] == [None] * len(ran)
    variants = {case.address: [v.name for v in case.variants] for case in recorded_run.cases}
    assert variants["precision", "digits"] == ["float32", "mixed_bfloat16", "mixed_float16"]
    assert [len(names) for (suite, _), names in variants.items() if suite == "pipeline"] == [4, 2, 2, 3]


def test_every_variant_computes_the_same(recorded_run):
    cases = [case for case in recorded_run.cases if case.workload != "photos, by hand"]
    checks = {(case.suite, v.name): v.check for case in cases for v in case.variants}
    assert checks.pop(("stack", "step alone")) is None  # trains nothing on
    assert {key: check.passed for key, check in checks.items()} == dict.fromkeys(checks, True)
    accuracies = checks["precision", "mixed_float16"].values
    assert len(accuracies) == 1
    assert min(accuracies) >= 0.95


def test_every_figure_has_raw_samples_behind_it(document, recorded):
    kept = recorded.path.parent.name.startswith("kept")
    for case in document["cases"]:
        measured = {v["name"]: StepTimes.from_dict(v["step_time"]) for v in case["variants"]}
        for v in case["variants"]:
            assert case["planned_turns"] in (len(v["step_time"]["repeats_ms"]), None)  # None in older files
            assert len(v["step_time"]["repeats_ms"]) >= 2
            # Intervals of kept runs are as they were taken then, by resampling.
            of_then = {"interval_ms": v["step_time"]["interval_ms"]} if kept else {}
            assert v["step_time"] == json.loads(json.dumps(measured[v["name"]].to_dict() | of_then))
            if v["name"] != case["baseline"]:
                expected = compare(measured[case["baseline"]], measured[v["name"]]).to_dict()
                of_then = {name: v["comparison"][name] for name in ("interval", "verdict")} if kept else {}
                assert v["comparison"] == json.loads(json.dumps(expected | of_then))


def test_the_environment_is_recorded(recorded_run):
    found = recorded_run.environment
    assert found["packages"]["tensorflow"].startswith("2.")
    assert found["host"]["cpus"] > 0
    assert isinstance(found["gpus"], list)
    assert "HOME" not in found["variables"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "error"),
    first_quick(
        [
            (planned_cases.second_raises, "RuntimeError: broken on purpose"),
            (planned_cases.second_is_killed, "was ended by signal 9"),
            (planned_cases.second_hangs, "Expected an answer within 5 s"),
        ],
        2,
    ),
)
def test_a_case_that_fails_is_a_row_and_the_others_go_on(planned, tmp_path, monkeypatch, make, error):
    monkeypatch.setenv("LIMIT", "5")
    planned(make)
    file = run_module.run([], tmp_path)
    one, two, three = file.run.cases
    assert one.error is None is three.error
    assert error in two.error
    assert file.run.status == "complete"
    assert [variant for variant in read(file.path).cases[1].variants if variant.turns] == []


@pytest.mark.slow
def test_a_refused_variant_is_no_failure(planned, tmp_path):
    planned(planned_cases.second_is_refused)
    file = run_module.run([], tmp_path)
    assert [case.done for case in read(file.path).cases] == [True] * 3
    assert [variant.refused for variant in file.run.cases[1].variants] == ["no such device"] * 2
    assert file.run.done


@pytest.mark.slow
def test_an_interrupt_keeps_what_was_measured(planned, tmp_path, monkeypatch, capsys):
    def interrupted(self, variant):
        if "two" in self._title:
            raise KeyboardInterrupt

    planned(planned_cases.three)
    monkeypatch.setattr(run_module.Progress, "tick", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_module.run([], tmp_path)
    (path,) = tmp_path.iterdir()
    said = capsys.readouterr().err
    assert f"Saved to {path}. To resume:" in " ".join(said.split())
    assert said.endswith(f"\ntfopt-bench run --resume --output {tmp_path}\n")
    found = read(path)
    assert found.status == "interrupted"
    assert [(case.suite, case.unfinished, case.turns) for case in found.cases] == [
        ("one", None, 4),
        ("two", "the run was interrupted", 1),
        ("three", NEVER_BEGAN, 0),
    ]


@pytest.mark.slow
def test_a_budget_ends_the_run_and_it_can_be_resumed(planned, tmp_path):
    planned(planned_cases.three)
    clock = itertools.count(0, 100)  # at the start, and before each case
    file = run_module.run([], tmp_path, budget_seconds=250, clock=lambda: next(clock))
    assert file.run.status == "out of budget"
    first = read(file.path)
    assert [(case.suite, case.unfinished) for case in first.cases] == [
        ("one", None),
        ("two", None),
        ("three", NEVER_BEGAN),
    ]
    assert "Never began: three on w." in formatting.lead(first)
    assert "three, w" not in report.terminal(first)
    assert "This case is unfinished: it never began." in report.page(first)
    resumed = run_module.run([], tmp_path, resume=True)
    assert resumed.path == file.path
    found = read(resumed.path)
    assert found.status == "complete"
    assert found.cases[:2] == first.cases[:2]
    assert [(case.suite, case.turns) for case in found.cases] == [("one", 4), ("two", 4), ("three", 4)]


@pytest.mark.slow
def test_a_complete_run_is_not_measured_again(planned, tmp_path, capsys):
    planned(planned_cases.three)
    first = run_module.run([], tmp_path)
    written = first.path.stat().st_mtime_ns
    planned(planned_cases.second_raises)
    again = run_module.run([], tmp_path, resume=True)
    assert (again.path, again.run, again.path.stat().st_mtime_ns) == (first.path, first.run, written)
    said = capsys.readouterr().err
    assert said.count("Found no GPU to sample.") == 1  # of three cases that each warn
    assert f"{first.path} is complete: nothing is left to measure." in " ".join(said.split())


@pytest.mark.slow
def test_a_case_asked_for_alone_must_exist_and_is_asked_for_again_by_a_resumed_run(planned, tmp_path, capsys):
    planned(planned_cases.one_of_each_suite)
    with pytest.raises(UnsupportedError, match=r"Expected a case of 'fit' on this device: 'fit/w'\. Received: 'fit/x'"):
        run_module.run(["fit/x"], tmp_path)
    assert "measures" not in capsys.readouterr().err  # what is never measured
    assert not list(tmp_path.glob("*.json"))
    file = run_module.run(["fit/w", "xla"], tmp_path)
    assert read(file.path).suites == ("fit/w", "xla")
    assert [case.address for case in file.run.cases] == [("fit", "w"), ("xla", "w")]
    assert RunFile.earlier(tmp_path, ["fit"]) is None
    assert RunFile.earlier(tmp_path, ["xla", "fit/w"]).path == file.path


@pytest.mark.slow
def test_without_an_earlier_run_one_is_started(planned, tmp_path):
    planned(planned_cases.three)
    assert run_module.run([], tmp_path / "none", resume=True).run.status == "complete"


@pytest.mark.slow
def test_a_case_is_cut_at_the_budget(planned, tmp_path):
    """Its turns are taken in four fifths of what is left, and fewer of them than planned."""
    planned(planned_cases.second_is_slow)
    file = run_module.run([], tmp_path, budget_seconds=15)
    found = read(file.path)
    assert found.status == "out of budget"
    one, two = found.cases[:2]
    assert one.done
    assert (two.unfinished, two.planned_turns, two.error) == ("the budget ran out", 100, None)
    a, b = two.variants
    assert 1 <= b.turns <= a.turns <= b.turns + 1 < 100
    assert b.metrics.comparison.ratio == pytest.approx(1.0)
    assert formatting.unfinished(two) == (
        f"w, unfinished, the budget ran out. Turns measured of 100 each: a {a.turns}, b {b.turns}."
    )


KILLED = """
import sys
import planned_cases
from tfopt.bench import run
if __name__ == "__main__":
    run._cases = getattr(planned_cases, sys.argv[1])
    run.run([], "results")
"""


@contextlib.contextmanager
def started(folder, make, **environ):
    """A run in a process of its own, once it has written the file "pid"."""
    (folder / "script.py").write_text(KILLED)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environ
    command = [sys.executable, "script.py", make.__name__]
    running = subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL)
    try:
        due = time.monotonic() + 300
        while not (folder / "pid").exists() or not (folder / "pid").read_text():
            assert running.poll() is None
            assert time.monotonic() < due
            time.sleep(0.1)
        yield running
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
def test_a_run_that_was_killed_is_resumed(planned, tmp_path):
    with started(tmp_path, planned_cases.second_hangs):
        pass
    (path,) = (tmp_path / "results").iterdir()
    before = read(path)
    assert (before.status, len(before.cases)) == ("running", 1)
    (tmp_path / "go").touch()
    planned(planned_cases.second_hangs)
    found = read(run_module.run([], tmp_path / "results", resume=True).path)
    assert found.cases[0] == before.cases[0]
    assert [(case.suite, case.error) for case in found.cases] == [("one", None), ("two", None), ("three", None)]


@pytest.mark.slow
@pytest.mark.parametrize("turn", first_quick([2, 1]) + campaign([5]))
def test_a_kill_loses_the_turn_under_way_and_no_more(planned, tmp_path, monkeypatch, turn):
    with started(tmp_path, planned_cases.second_pauses, PAUSE=str(turn)):
        pass
    (path,) = (tmp_path / "results").iterdir()
    before = read(path)
    one, two = before.cases
    assert (before.status, one.done, two.unfinished) == ("running", True, UNDER_WAY)
    assert [variant.turns for variant in two.variants] == [(turn + 1) // 2, turn // 2]
    assert two.variants[0].metrics.verdict == "baseline"
    assert (two.variants[1].metrics is None) == (turn == 1)
    counted = f"Turns measured of 3 each: a {(turn + 1) // 2}, b {turn // 2}."
    assert counted in " ".join(report.terminal(before).split())
    assert counted in report.page(before)
    (tmp_path / "go").touch()
    monkeypatch.setenv("PAUSE", "99")
    monkeypatch.setenv("MS", "3")
    planned(planned_cases.second_pauses)
    found = read(run_module.run([], tmp_path / "results", resume=True).path)
    assert [(case.suite, case.done, case.turns) for case in found.cases] == [
        ("one", True, 4),
        ("two", True, 6),
        ("three", True, 4),
    ]
    assert found.cases[0] == one
    for before, after in zip(two.variants, found.cases[1].variants, strict=True):
        kept = ((2.0, 2.0),) * before.turns
        assert after.times.repeats_ms == (*kept, *((3.0, 3.0),) * (3 - before.turns))


@pytest.mark.parametrize("turn", first_quick([3], 0) + campaign([0]))
def test_a_case_whose_process_is_killed_keeps_its_turns(planned, tmp_path, turn):
    with started(tmp_path, planned_cases.second_pauses, PAUSE=str(turn)) as running:
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
        assert running.wait(300) == 0
    (path,) = (tmp_path / "results").iterdir()
    found = read(path)
    one, two, three = found.cases
    assert (found.status, one.done, three.done) == ("complete", True, True)
    assert "was ended by signal 9" in two.error
    assert [variant.turns for variant in two.variants] == ([] if turn == 0 else [2, 1])
    assert all(variant.metrics for variant in two.variants)
    assert not found.done


def test_an_earlier_try_with_more_turns_is_kept(tmp_path):
    def case(turns, unfinished="cut"):
        times = planned_cases.times(1.0)
        variant = VariantResult(name="a", times=replace(times, repeats_ms=times.repeats_ms * turns))
        fields = {"suite": "s", "workload": "w", "question": "?", "unit": "step", "baseline": "a"}
        return CaseResult(**fields, variants=(variant,), unfinished=unfinished).with_metrics()

    environment = {"tfopt": "0", "packages": {}, "gpus": [], "host": {"cpu_model": None, "cpus": 2.0}}
    file = RunFile.create(tmp_path, ["s"], environment)
    for put, kept in ((3, 3), (1, 3), (4, 4)):
        file.put(case(put))
        assert read(file.path).cases[0].turns == kept
    file.put(case(2, unfinished=None))
    assert read(file.path).cases == (case(2, unfinished=None),)


@pytest.mark.slow
def test_what_failed_is_measured_again_after_what_was_never_tried(planned, tmp_path, capsys):
    planned(planned_cases.second_raises)
    clock = itertools.count(0, 100)
    path = run_module.run([], tmp_path, budget_seconds=250, clock=lambda: next(clock)).path
    capsys.readouterr()
    planned(planned_cases.three)
    resumed = run_module.run([], tmp_path, resume=True)
    said = capsys.readouterr().err
    assert [line.split(" …")[0] for line in said.splitlines() if " …" in line] == ["three on w", "two on w"]
    assert said.replace("\n", " ").startswith(f"tfopt-bench: resuming {path}.")
    assert "\nRemaining: three, two (about 20 s).\n" in said
    assert resumed.path == path
    assert [(case.suite, case.error) for case in resumed.run.cases] == [("one", None), ("two", None), ("three", None)]


def test_another_machine_is_not_resumed(planned, tmp_path):
    planned(planned_cases.three)
    path = run_module.run([], tmp_path, budget_seconds=1e-9).path
    document = json.loads(path.read_text())
    document["environment"]["driver"] = "1.2.3"
    path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=r"Found driver: 1.2.3 and none\."):
        run_module.run([], tmp_path, resume=True)
    assert json.loads(path.read_text()) == document


@pytest.mark.slow
def test_another_patch_of_the_system_is_resumed_and_said(planned, tmp_path):
    planned(planned_cases.three)
    path = run_module.run([], tmp_path, budget_seconds=1e-9).path
    document = json.loads(path.read_text())
    python = document["environment"]["python"]
    document["environment"]["python"] = before = python.rsplit(".", 1)[0] + ".99"
    path.write_text(json.dumps(document))
    found = run_module.run([], tmp_path, resume=True).run
    assert (found.done, found.resumed) == (True, (f"python: {before} and {python}",))
    assert f"Changed before the run was resumed: python: {before} and {python}." in formatting.lead(found)


@pytest.mark.slow
def test_a_run_of_other_suites_is_another_run(planned, tmp_path):
    planned(planned_cases.three)
    first = run_module.run(["xla"], tmp_path, budget_seconds=1e-9)
    second = run_module.run(["fit"], tmp_path, resume=True)
    assert second.path != first.path
    assert run_module.run(["xla"], tmp_path, resume=True).path == first.path


@pytest.mark.slow
def test_the_cases_share_the_autotuning_cache_that_their_listing_has_set_up(planned, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    planned(planned_cases.with_flags)
    file = run_module.run([], tmp_path)
    assert [case.error for case in file.run.cases] == [None]


def test_the_process_that_waits_loads_no_tensorflow(tmp_path):
    code = "import sys; from tfopt.bench import cli, run, report; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_cases_share_a_budget(planned, tmp_path):
    """Each takes fewer turns, instead of the last none."""
    planned(planned_cases.all_slow)
    file = run_module.run([], tmp_path, budget_seconds=24)
    assert [case.unfinished for case in file.run.cases] == ["the budget ran out"] * 3
    assert all(variant.turns >= 1 for case in file.run.cases for variant in case.variants)


def test_every_suite_gets_something_before_one_gets_everything():
    cases = [SimpleNamespace(planned=SimpleNamespace(suite=suite), at=at) for at, suite in enumerate("aaabcc")]
    assert [(one.planned.suite, one.at) for one in run_module._each_suite_first(cases)] == [
        ("a", 0),
        ("b", 3),
        ("c", 4),
        ("a", 1),
        ("c", 5),
        ("a", 2),
    ]


@pytest.mark.slow
def test_what_other_programs_take_is_recorded_and_waited_for(planned, tmp_path, monkeypatch, capsys):
    shares = iter([90.0, 40.0, 0.0])

    class Others:
        def cpu_percent(self):
            return next(shares, 0.0)

    monkeypatch.setattr(run_module, "OtherProcesses", Others)
    monkeypatch.setattr(run_module, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(run_module, "_LEAST_WAIT_SECONDS", 0.0)
    planned(planned_cases.three)
    file = run_module.run([], tmp_path)
    said = capsys.readouterr().err
    assert said.count("other programs, which take 90 % of the CPUs") == 1
    assert next(shares, None) is None
    assert all(0 <= case.others_cpu_percent <= 100 for case in read(file.path).cases)


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
    while not any(read(path).cases for path in tmp_path.glob("results/*.json") if path.stat().st_size):
        assert killed.poll() is None
        assert time.monotonic() < due
        time.sleep(0.1)
    killed.kill()
    killed.wait()
    (path,) = tmp_path.glob("results/*.json")
    before = read(path)
    assert (before.status, before.small, before.suites[:2]) == ("running", True, ("fit/resnet50", "fit/gpt2"))
    resumed = [*command, "40", "--resume"]
    assert subprocess.run(resumed, cwd=tmp_path, env=environ, capture_output=True, check=False).returncode == 0
    after = read(path)
    assert after.status == "out of budget"
    assert sum(case.turns for case in after.cases) > sum(case.turns for case in before.cases)
    done = [case for case in before.cases if case.done]
    assert [after.case(case.address) for case in done] == done
    report = [sys.executable, "-m", "tfopt.bench", "report", "results"]
    subprocess.run(report, cwd=tmp_path, env=environ, capture_output=True, check=True)
    assert "Run at CPU sizes" in (tmp_path / "results" / "benchmarks.md").read_text()
