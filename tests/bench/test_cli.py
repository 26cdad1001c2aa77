import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tfopt.bench import cli, run, suites
from tfopt.bench.results import NEVER_BEGAN, VariantResult
from tfopt.bench.results.run_file import dumps, read
from tfopt.errors import UnsupportedError


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    """The folder of the results is made where a test runs, and no message is wrapped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def fits(monkeypatch):
    """Makes the terminal narrow, and checks that a text fits it."""
    monkeypatch.setenv("COLUMNS", "80")

    def check(text):
        assert max(map(len, text.splitlines())) <= 80

    return check


@pytest.fixture
def played(monkeypatch, recorded):
    """`run` answers with the recorded run, changed as the test wants."""

    class Played:
        path = recorded.path
        run = recorded.run

    calls = []

    def play(names, folder, **options):
        calls.append((list(names), folder, options))
        return Played

    monkeypatch.setattr(run, "run", play)
    Played.calls = calls
    return Played


@pytest.mark.parametrize(("found", "budget"), [([], 285), (["a GPU"], None)])
def test_without_arguments_every_suite_runs(played, capsys, monkeypatch, found, budget):
    monkeypatch.setattr("tfopt.hardware.gpus", lambda: found)
    assert cli.main([]) == cli.DONE
    options = {"budget_seconds": budget, "resume": False}
    assert played.calls == [([], "tfopt-bench-results", options)]
    output = capsys.readouterr().out
    assert "float32" in output
    assert str(played.path) in output
    assert "mixed_bfloat16" in played.path.with_suffix(".html").read_text()


def test_json_is_one_document(played, capsys):
    assert cli.main(["--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out) == json.loads(dumps(played.run))


def test_suites_output_and_budget(played, tmp_path):
    assert cli.main(["run", "xla", "pipeline", "--output", str(tmp_path), "--budget", "60", "--resume"]) == cli.DONE
    assert played.calls == [(["xla", "pipeline"], str(tmp_path), {"budget_seconds": 60.0, "resume": True})]


def with_first(run, change):
    """The run with its first case changed."""
    first, *others = run.cases
    return replace(run, cases=(change(first), *others))


def test_a_changed_result_is_exit_code_4(played):
    def changed(case):
        wrong = replace(case.variants[1], check=replace(case.variants[1].check, passed=False))
        return replace(case, variants=(case.variants[0], wrong, *case.variants[2:])).with_metrics()

    played.run = with_first(played.run, changed)
    assert cli.main([]) == cli.FAILED


def test_a_failed_case_is_exit_code_1(played):
    played.run = with_first(played.run, lambda case: replace(case, error="RuntimeError: no", variants=()))
    assert cli.main([]) == cli.INTERNAL


def test_an_unfinished_or_refused_one_is_no_failure(played):
    def cut(case):
        refused = VariantResult(name=case.variants[1].name, refused="no such device")
        return replace(case, unfinished="the budget ran out", variants=(case.variants[0], refused))

    played.run = with_first(played.run, cut)
    assert cli.main([]) == cli.DONE


def test_a_run_that_measured_nothing_is_exit_code_3_and_says_how_to_go_on(played, capsys):
    nothing = [replace(case, variants=(), unfinished=NEVER_BEGAN) for case in played.run.cases]
    played.run = replace(played.run, cases=tuple(nothing), status="out of budget")
    assert cli.main([]) == cli.ENVIRONMENT
    said = capsys.readouterr()
    assert "nothing was measured: the budget ran out" in said.err
    assert "To measure the rest: tfopt-bench run --resume --output tfopt-bench-results\n" in said.out
    assert "Never began: stack on photos; " in " ".join(said.out.split())


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (UnsupportedError("no scikit-learn"), 3), (OSError("disk full"), 3)],
)
def test_other_ends(monkeypatch, capsys, error, code):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(run, "run", fail)
    assert cli.main(["run"]) == code
    assert capsys.readouterr().err.startswith("tfopt-bench: ")


def test_an_unknown_suite_is_exit_code_2_with_the_nearest(fits, capsys):
    assert cli.main(["run", "pipelines"]) == cli.USAGE
    error = capsys.readouterr().err
    assert "Did you mean 'pipeline'?" in " ".join(error.split())
    fits(error)


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["run", "--budget", "0"],
        ["run", "--budget", "1"],
        ["run", "--budget", "x"],
        ["compare", "a"],
        ["--wrong"],
    ],
)
def test_wrong_usage_is_exit_code_2(arguments, fits, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == cli.USAGE
    error = capsys.readouterr().err
    assert "usage: tfopt-bench" in error
    assert "_seconds" not in error
    fits(error)


@pytest.mark.parametrize(
    ("received", "meant"),
    [("runn", "'run'"), ("fit", "'run fit'"), ("gpu", "'run gpu'"), ("reprot", "'report'")],
)
def test_an_unknown_command_is_exit_code_2_with_what_was_meant(received, meant, fits, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([received])
    assert ended.value.code == cli.USAGE
    error = capsys.readouterr().err
    assert f"Did you mean {meant}?" in " ".join(error.split())
    fits(error)


def test_help_fits_the_terminal(fits, capsys):
    for command in ([], ["run"]):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        text = capsys.readouterr().out
        assert all(re.search(f"^  {name} ", text, re.M) for name in suites.SUMMARIES)
        fits(text)


def test_list(fits, capsys):
    assert cli.main(["list"]) == cli.DONE
    text = capsys.readouterr().out
    assert all(name in text for name in suites.SUMMARIES)
    fits(text)
    assert cli.main(["list", "--json"]) == cli.DONE
    assert list(json.loads(capsys.readouterr().out)) == [*suites.SUMMARIES, "gpu"]


@pytest.mark.slow
def test_env(capsys):
    assert cli.main(["env", "--json"]) == cli.DONE
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["env"]) == cli.DONE
    text = capsys.readouterr().out
    assert found["packages"]["tensorflow"] in text
    assert re.search(r"host\.memory_total +[\d.]+ GiB\n", text)
    assert re.search(r"host\.cpus +[\d.]*[1-9]\n", text)
    assert "[]" not in text


@pytest.mark.slow
def test_report(recorded, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(recorded.path), "--output", str(page)]) == cli.DONE
    assert "mixed_bfloat16" in page.read_text()
    assert str(page) in capsys.readouterr().out
    assert cli.main(["report", str(recorded.path), "--output", str(page), "--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out) == json.loads(dumps(recorded.run))


@pytest.mark.parametrize(
    ("output", "found"), [("folder", "'folder' is a folder"), ("none/x.html", "there is no folder 'none'")]
)
def test_report_checks_its_output_first(recorded, capsys, fits, output, found):
    Path("folder").mkdir()
    before = sorted(Path().iterdir())
    assert cli.main(["report", str(recorded.path), "--output", output]) == cli.USAGE
    error = capsys.readouterr().err
    fits(error)
    assert f"Found: {found}." in " ".join(error.split())
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize("command", ["run", "report"])
def test_a_folder_that_is_not_writable_is_named_itself(recorded, monkeypatch, capsys, command):
    Path("ro").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != "ro")
    monkeypatch.setattr(run, "run", lambda *_, **__: pytest.fail("it was measured"))
    arguments = ["run", "--output", "ro"] if command == "run" else ["report", str(recorded.path), "--output", "ro/p"]
    assert cli.main(arguments) == cli.USAGE
    assert "'ro' is not" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("documented", "written"), [(True, "docs/benchmarks"), (False, "runs/benchmarks")])
def test_report_of_a_folder(recorded, tmp_path, monkeypatch, capsys, documented, written):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(recorded.path.parent, "runs", ignore=shutil.ignore_patterns("*.html"))
    if documented:
        Path("docs").mkdir()
    assert cli.main(["report", "runs", "--json"]) == cli.DONE
    found = json.loads(capsys.readouterr().out)
    picture = f"{written}/{recorded.path.stem}-stack-photos.svg"
    assert found == [f"{written}.md", f"{written}.html", picture]
    assert all(Path(path).stat().st_size > 1000 for path in found)
    assert cli.main(["report", "runs", "--output", "other/b.md"]) == cli.USAGE
    assert not Path("other").exists()
    Path("other").mkdir()
    (Path("runs") / "broken.json").write_text("{")
    capsys.readouterr()
    assert cli.main(["report", "runs", "--output", "other/b.md"]) == cli.DONE
    assert "warning: skipped 'runs/broken.json'" in capsys.readouterr().err
    assert Path("other/b.md").read_text() == Path(found[0]).read_text().replace("(benchmarks/", "(b/")
    assert Path("other/b.html").read_text() == Path(found[1]).read_text()
    assert cli.main(["report", "runs"]) == cli.DONE  # over its own


@pytest.mark.parametrize("output", ["page.html", "folder", "mine.md"])
def test_report_of_a_folder_overwrites_nothing_else(recorded, tmp_path, monkeypatch, capsys, output):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("mine.md").write_text("# My notes")
    assert cli.main(["report", str(recorded.path.parent), "--output", output]) == cli.USAGE
    assert output in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "mine.md"]
    assert Path("mine.md").read_text() == "# My notes"


def test_report_of_an_empty_folder_is_exit_code_2(tmp_path, capsys):
    assert cli.main(["report", str(tmp_path)]) == cli.USAGE
    assert "Expected results of tfopt-bench" in capsys.readouterr().err


def test_a_cut_results_file_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "cut.json").write_text('{"schema": "tf')
    assert cli.main(["report", str(tmp_path / "cut.json")]) == cli.USAGE
    assert "truncated" in capsys.readouterr().err


def steady(run):
    """The run as a machine without noise would have it, so that it compares the same whatever else runs here."""

    def flat(one):
        repeats = tuple((one.times.median_ms,) * len(repeat) for repeat in one.times.repeats_ms)
        return replace(one, times=replace(one.times, repeats_ms=repeats))

    cases = [replace(case, variants=tuple(map(flat, case.variants)), communication=None) for case in run.cases]
    return replace(run, cases=tuple(case.with_metrics() for case in cases))


def slowed(run, factor, *, baselines=1.0):
    """The same run in which the variants took longer, and their baselines, honestly recorded."""

    def variant(case, one):
        by = baselines if one.name == case.baseline else factor
        repeats = tuple(tuple(ms * by for ms in repeat) for repeat in one.times.repeats_ms)
        return replace(one, times=replace(one.times, repeats_ms=repeats))

    def changed(case):
        variants = tuple(variant(case, one) for one in case.variants)
        return replace(case, variants=variants).with_metrics()

    return replace(run, cases=tuple(map(changed, run.cases)))


@pytest.fixture
def before(recorded):
    return steady(recorded.run)


@pytest.fixture
def compared(before, tmp_path, capsys):
    """Compares the recorded run with another; returns the exit code and what was printed."""

    def compare_with(run, *options):
        (tmp_path / "before.json").write_text(dumps(before))
        (tmp_path / "other.json").write_text(dumps(run))
        code = cli.main(["compare", str(tmp_path / "before.json"), str(tmp_path / "other.json"), *options])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return compare_with


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (2.0, 4), (0.5, 0)])
def test_compare(before, compared, factor, code):
    found, text = compared(slowed(before, factor))
    assert found == code
    assert ("REGRESSION" in text) == (code == 4)
    found, text = compared(slowed(before, factor), "--json")
    assert found == code
    judged = [change for change in json.loads(text) if "not judged" not in change["finding"]]
    assert {change["failed"] for change in judged} == {code == 4}
    assert [round(change["comparison"]["ratio"], 6) for change in judged] == [1 / factor] * len(judged)


@pytest.mark.slow
def test_a_slower_machine_is_no_regression(before, compared, fits):
    code, text = compared(slowed(before, 2.0, baselines=2.0))
    assert code == cli.DONE
    assert text.startswith("Each variant's speed relative to its baseline, second run over first:\n")
    fits(text)
    assert re.search(r"\nNone of \d+ compared variants regressed\.\n$", text)
    assert "0.50× [" in text
    assert "the machine's own speed, not judged" in text


@pytest.mark.slow
def test_a_threshold_can_be_chosen(before, compared):
    assert compared(slowed(before, 2.0), "--threshold", "60")[0] == cli.DONE


@pytest.mark.parametrize("threshold", ["nan", "-1", "100", "x"])
def test_a_threshold_is_a_percentage(recorded, threshold, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["compare", "a", "b", "--threshold", threshold])
    assert ended.value.code == cli.USAGE


def test_a_run_is_not_compared_with_itself(recorded, capsys, fits):
    assert cli.main(["compare", str(recorded.path), str(recorded.path)]) == cli.USAGE
    error = capsys.readouterr().err
    assert "both are the same file" in " ".join(error.split())
    fits(error)


def test_only_common_suites_are_compared(before, compared, fits):
    (fit,) = [case for case in before.cases if case.suite == "fit"]
    code, text = compared(replace(before, cases=(fit,)))
    assert code == cli.DONE
    fits(text)
    said = " ".join(text.split())
    assert "The second run has only the suite fit; variants of other suites were not compared." in said
    assert said.endswith(f"None of {len(fit.variants)} compared variants regressed.")
    assert "photos" not in text


@pytest.mark.slow
def test_what_failed_in_the_second_run_fails_and_what_is_missing_is_told_apart(before, compared):
    first, second, third, *others = before.cases
    assert second.address == ("precision", "digits")
    refused = VariantResult(name=third.variants[1].name, refused="no such device")
    cases = (
        replace(first, error="RuntimeError: broken", variants=()),
        replace(third, variants=(third.variants[0], refused)),
        *others,
    )
    code, text = compared(replace(before, cases=cases))
    assert code == cli.FAILED
    assert "failed: RuntimeError: broken" in text
    assert "The second run has only the suites" in text
    assert "mixed_float16" not in text
    assert re.search(f"xla, digits, {refused.name}\n +– +refused: no such device", text)
    assert re.search(r"\n7 of \d+ compared variants regressed or changed:\n- stack, photos: naive Keras\n", text)


@pytest.mark.slow
def test_what_the_first_run_lacks_is_not_compared(before, compared, tmp_path, capsys):
    """A variant that was refused there, and a case cut before its end."""
    first, second, *others = before.cases
    waiting = VariantResult(name=second.variants[2].name)
    cases = (replace(second, variants=(*second.variants[:2], waiting), unfinished="cut"), *others)
    (tmp_path / "before.json").write_text(dumps(before))
    (tmp_path / "first.json").write_text(dumps(replace(before, cases=cases)))
    assert cli.main(["compare", str(tmp_path / "first.json"), str(tmp_path / "before.json")]) == cli.DONE
    text = capsys.readouterr().out
    assert waiting.name not in text
    assert second.variants[1].name in text
    code, text = compared(replace(before, cases=(first, *cases)))
    assert code == cli.DONE
    assert f"- precision, digits: {waiting.name} (not measured: cut)\n" in text
    assert re.search(r"\nNone of \d+ compared variants regressed\.\n$", text)


@pytest.mark.slow
def test_a_result_that_changed_fails(before, compared):
    def changed(case):
        wrong = replace(case.variants[1], check=replace(case.variants[1].check, passed=False))
        return replace(case, variants=(case.variants[0], wrong, *case.variants[2:])).with_metrics()

    code, text = compared(with_first(before, changed))
    assert code == cli.FAILED
    assert "CHANGES THE RESULT" in text


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["packages", "python", "driver", "cuda"])
def test_unlike_runs_are_refused_unless_forced(before, compared, entry):
    environment = before.environment
    other = {**environment["packages"], "tensorflow": "3.0"} if entry == "packages" else "0"
    run = replace(before, environment=environment | {entry: other})
    code, text = compared(run)
    assert code == cli.FAILED
    assert "Use --force" in text
    if entry == "packages":
        assert f"Found tensorflow: {environment['packages']['tensorflow']} and 3.0. Use" in text
    assert compared(run, "--force")[0] == cli.DONE


@pytest.mark.slow
def test_another_patch_of_the_system_is_refused_too(before, compared):
    python = before.environment["python"] + "1"
    run = replace(before, environment=before.environment | {"python": python})
    assert compared(run)[0] == cli.FAILED


def test_runs_that_share_nothing_are_refused(before, compared):
    code, text = compared(replace(before, cases=()))
    assert code == cli.FAILED
    assert "share a case" in text


@pytest.mark.parametrize(("output", "found"), [("file", "File exists"), ("file/folder", "Not a directory")])
def test_an_output_that_cannot_be_written_is_wrong_usage(tmp_path, monkeypatch, capsys, output, found):
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "run", lambda *_, **__: pytest.fail("it was measured"))
    assert cli.main(["run", "--output", str(tmp_path / output)]) == cli.USAGE
    assert found in capsys.readouterr().err


@pytest.mark.parametrize("command", [["report", "none.json"], ["compare", "a.json", "b.json"], ["run", "nonsense"]])
def test_what_is_wrong_is_said_before_tensorflow_is_loaded(tmp_path, command):
    code = "import sys; from tfopt.bench.cli import main; code = main(sys.argv[1:])\n"
    code += "sys.exit(100 + code if 'tensorflow' in sys.modules else code)"
    ended = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == cli.USAGE
    assert "Expected" in ended.stderr


def test_an_unreadable_file_is_wrong_usage(recorded, tmp_path, capsys):
    assert cli.main(["compare", str(recorded.path), str(tmp_path / "none.json")]) == cli.USAGE


def test_a_missing_package_ends_the_run_before_it_begins(monkeypatch, tmp_path, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jinja2" else find(name))
    assert cli.main(["run", "--output", str(tmp_path / "none")]) == cli.ENVIRONMENT
    assert "pip install 'tfopt[bench]'" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_measured(tmp_path, number):
    """A run of its own process, ended in its second case."""
    code = (
        "import signal, sys\nimport planned_cases\nfrom tfopt.bench import run\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where the tests run in the background
        "run._cases = planned_cases.second_hangs\n"
        "from tfopt.bench.cli import main\nsys.exit(main(['run', '--output', sys.argv[1]]))"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environ)
    for line in process.stderr:
        if line.startswith("two on w"):
            break
    process.send_signal(number)
    process.communicate()
    assert process.returncode == 128 + number
    (path,) = tmp_path.glob("*.json")
    found = read(path)
    assert found.status == "interrupted"
    never = run.NEVER_BEGAN
    assert [(case.suite, case.unfinished) for case in found.cases] == [("one", None), ("two", never), ("three", never)]


@pytest.fixture
def checkpoints(tmp_path):
    from tfopt.checkpoint.folder.store import Store

    with Store(tmp_path / "saved") as store:
        for step in (7, 14):
            store.write(step, {"kernel": np.full(3, step)}, {"metrics": {"loss": 1 / step}})
    return tmp_path / "saved"


def test_checkpoints_are_listed(checkpoints, capsys):
    assert cli.main(["checkpoint", "list", str(checkpoints)]) == cli.DONE
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["step 14", "step 7"]
    assert cli.main(["checkpoint", "list", str(checkpoints), "--json"]) == cli.DONE
    assert [each["step"] for each in json.loads(capsys.readouterr().out)] == [14, 7]
    assert cli.main(["checkpoint", "list", str(checkpoints.parent)]) == cli.DONE
    assert capsys.readouterr().out.startswith("no checkpoints in ")


def test_checkpoints_are_verified(checkpoints, capsys):
    assert cli.main(["checkpoint", "verify", str(checkpoints)]) == cli.DONE
    assert capsys.readouterr().out == "2 checkpoints: every checksum matches\n"
    damaged = next((checkpoints / "blobs").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert cli.main(["checkpoint", "verify", str(checkpoints), "--json"]) == cli.FAILED
    assert json.loads(capsys.readouterr().out)["problems"]
    assert cli.main(["checkpoint", "verify", str(checkpoints.parent)]) == cli.USAGE
    assert "Expected a checkpoint in" in capsys.readouterr().err
