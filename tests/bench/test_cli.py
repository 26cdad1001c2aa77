import copy
import json

import pytest

from tfopt.bench import cli, run, suites
from tfopt.bench.results import dumps
from tfopt.errors import UnsupportedError


@pytest.fixture
def played(monkeypatch, recorded):
    """`run` answers with the recorded run, changed as the test wants."""

    class Played:
        path = recorded.path
        document = copy.deepcopy(recorded.document)

    calls = []

    def play(names, folder, **options):
        calls.append((list(names), folder, options))
        return Played

    monkeypatch.setattr(run, "run", play)
    Played.calls = calls
    return Played


def test_without_arguments_every_suite_runs(played, capsys):
    assert cli.main([]) == cli.DONE
    assert played.calls == [([], "tfopt-bench-results", {"budget_seconds": None})]
    output = capsys.readouterr().out
    assert "float32" in output
    assert str(played.path) in output
    assert "mixed_bfloat16" in played.path.with_suffix(".html").read_text()


def test_json_is_one_document(played, capsys):
    assert cli.main(["--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out) == json.loads(dumps(played.document))


def test_suites_output_and_budget(played, tmp_path):
    assert cli.main(["run", "xla", "pipeline", "--output", str(tmp_path), "--budget", "60"]) == cli.DONE
    assert played.calls == [(["xla", "pipeline"], str(tmp_path), {"budget_seconds": 60.0})]


def test_a_changed_result_is_exit_code_4(played):
    played.document["cases"][0]["variants"][1]["verdict"] = "changes the result"
    assert cli.main([]) == cli.FAILED


def test_a_failed_case_is_exit_code_1(played):
    played.document["cases"][0].update(error="RuntimeError: no", variants=[])
    assert cli.main([]) == cli.INTERNAL


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


def test_an_unknown_suite_is_exit_code_2_with_the_nearest(capsys):
    assert cli.main(["run", "pipelines"]) == cli.USAGE
    assert "Did you mean 'pipeline'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["run", "--budget", "0"], ["run", "--budget", "x"], ["compare", "a"], ["--wrong"]]
)
def test_wrong_usage_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == cli.USAGE
    assert "usage: tfopt-bench" in capsys.readouterr().err


def test_list(capsys):
    assert cli.main(["list"]) == cli.DONE
    text = capsys.readouterr().out
    assert all(name in text for name in suites.SUMMARIES)
    assert cli.main(["list", "--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out) == suites.SUMMARIES


def test_env(capsys):
    assert cli.main(["env", "--json"]) == cli.DONE
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["env"]) == cli.DONE
    text = capsys.readouterr().out
    assert found["packages"]["tensorflow"] in text
    assert "host.cpus" in text


def test_report(recorded, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert cli.main(["report", str(recorded.path), "--output", str(page)]) == cli.DONE
    assert "mixed_bfloat16" in page.read_text()
    assert str(page) in capsys.readouterr().out
    assert cli.main(["report", str(recorded.path), "--output", str(page), "--json"]) == cli.DONE
    assert json.loads(capsys.readouterr().out) == json.loads(dumps(recorded.document))


def test_a_cut_results_file_is_exit_code_2(tmp_path, capsys):
    (tmp_path / "cut.json").write_text('{"schema": "tf')
    assert cli.main(["report", str(tmp_path / "cut.json")]) == cli.USAGE
    assert "cut short" in capsys.readouterr().err


def slowed(document, factor):
    """The same run in which everything took longer, honestly recorded."""
    from tfopt.measure import StepTimes

    changed = copy.deepcopy(document)
    for case in changed["cases"]:
        for variant in case["variants"]:
            times = StepTimes.from_dict(variant["step_time"])
            repeats = tuple(tuple(ms * factor for ms in repeat) for repeat in times.repeats_ms)
            slow = StepTimes(repeats_ms=repeats, steps_per_sample=times.steps_per_sample, first_step_seconds=1.0)
            variant["step_time"] = slow.to_dict()
    return changed


@pytest.mark.parametrize(("factor", "code"), [(1.0, 0), (2.0, 4), (0.5, 0)])
def test_compare(recorded, tmp_path, capsys, factor, code):
    other = tmp_path / "other.json"
    other.write_text(dumps(slowed(recorded.document, factor)))
    assert cli.main(["compare", str(recorded.path), str(other)]) == code
    assert ("REGRESSION" in capsys.readouterr().out) == (code == 4)
    assert cli.main(["compare", str(recorded.path), str(other), "--json"]) == code
    assert {change["regressed"] for change in json.loads(capsys.readouterr().out)} == {code == 4}


def test_a_threshold_can_be_chosen(recorded, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(dumps(slowed(recorded.document, 2.0)))
    assert cli.main(["compare", str(recorded.path), str(other), "--threshold", "60"]) == cli.DONE


def test_unlike_runs_are_refused_unless_forced(recorded, tmp_path, capsys):
    document = copy.deepcopy(recorded.document)
    document["environment"]["packages"]["tensorflow"] = "3.0"
    other = tmp_path / "other.json"
    other.write_text(dumps(document))
    assert cli.main(["compare", str(recorded.path), str(other)]) == cli.FAILED
    assert "Use --force" in capsys.readouterr().err
    assert cli.main(["compare", str(recorded.path), str(other), "--force"]) == cli.DONE


def test_runs_that_share_nothing_are_refused(recorded, tmp_path, capsys):
    document = copy.deepcopy(recorded.document)
    document["cases"] = []
    other = tmp_path / "other.json"
    other.write_text(dumps(document))
    assert cli.main(["compare", str(recorded.path), str(other)]) == cli.FAILED
    assert "share a variant" in capsys.readouterr().err
