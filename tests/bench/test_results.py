import copy
import json

import pytest

from tfopt.bench.results import Results, dumps, read
from tfopt.errors import ResultsError
from tfopt.measure import StepTimes, compare

ENVIRONMENT = {"tfopt": "0", "packages": {}, "gpus": [], "host": {"cpu_model": None, "cpus": 2.0}}


def case():
    a = StepTimes(repeats_ms=((4.0, 4.1), (4.2, 4.0)), steps_per_sample=5, first_step_seconds=1.0)
    b = StepTimes(repeats_ms=((2.0, 2.1), (2.2, 2.0)), steps_per_sample=5, first_step_seconds=1.0)
    fields = {"note": "", "check": None}
    return {
        "suite": "xla",
        "workload": "digits",
        "question": "?",
        "unit": "step",
        "baseline": "off",
        "variants": [
            {"name": "off", "step_time": a.to_dict(), "comparison": None, "verdict": "baseline", **fields},
            {
                "name": "on",
                "step_time": b.to_dict(),
                "comparison": compare(a, b).to_dict(),
                "verdict": "faster",
                **fields,
            },
        ],
        "error": None,
    }


@pytest.fixture
def written(tmp_path):
    results = Results(tmp_path, ["xla"], ENVIRONMENT)
    results.add(case())
    results.end("complete")
    return results


def test_what_was_written_is_read_back(written):
    assert read(written.path) == json.loads(dumps(written.document))


@pytest.mark.parametrize("extra", [{}, {"peak_memory_mib": None}, {"peak_memory_mib": 17.5, "recommended": True}])
def test_what_older_runs_lack_may_be_missing(written, extra):
    document = edited(written.document, lambda case: case["variants"][1].update(extra))
    written.path.write_text(dumps(document))
    assert read(written.path) == json.loads(dumps(document))


def test_every_case_is_on_the_disk_at_once(tmp_path):
    results = Results(tmp_path, ["xla"], ENVIRONMENT)
    assert read(results.path)["status"] == "running"
    results.add(case())
    assert len(read(results.path)["cases"]) == 1


def test_runs_of_one_second_do_not_overwrite_each_other(tmp_path):
    paths = {Results(tmp_path, [], {}).path for _ in range(3)}
    assert len(paths) == 3


@pytest.mark.parametrize("keep", [0, 1, 50, -2])
def test_a_cut_file_is_refused(written, keep):
    text = written.path.read_text()
    written.path.write_text(text[:keep])
    with pytest.raises(ResultsError, match=r"cut short or no JSON.*Run tfopt-bench again"):
        read(written.path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"3", b'{"schema": "other"}'])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ResultsError, match=r"Expected a results file of tfopt-bench\. Found"):
        read(tmp_path / "x.json")


def test_a_missing_file_or_folder_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ResultsError, match="Give an existing file"):
            read(path)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused(written, version):
    document = {**json.loads(written.path.read_text()), "schema_version": version}
    written.path.write_text(dumps(document))
    with pytest.raises(ResultsError, match=f"Expected schema version 1. Found {version!r}"):
        read(written.path)


def edited(document, change):
    document = copy.deepcopy(document)
    change(document["cases"][0])
    return document


@pytest.mark.parametrize(
    "change",
    [
        lambda case: case["variants"][1]["step_time"].update(median_ms=1.0),
        lambda case: case["variants"][1]["comparison"].update(ratio=3.0),
        lambda case: case["variants"][1]["step_time"].update(repeats_ms=[[1.0, 1.0], [1.0, 1.0]]),
        lambda case: case["variants"][1]["step_time"].update(repeats_ms=[]),
        lambda case: case["variants"][1].pop("step_time"),
        lambda case: case.update(baseline="none"),
        lambda case: case.pop("variants"),
        lambda case: case["variants"][1].update(verdict="slower"),
        lambda case: case["variants"][1].update(comparison=None),
        lambda case: case["variants"][1].update(check={"passed": False}),
        lambda case: case["variants"][1].update(verdict="splendid"),
        lambda case: case.pop("error"),
        lambda case: case["variants"][1].update(peak_memory_mib=-1),
        lambda case: case["variants"][1].update(peak_memory_mib="much"),
    ],
)
def test_figures_that_do_not_follow_from_their_samples_are_refused(written, change):
    written.path.write_text(dumps(edited(written.document, change)))
    with pytest.raises(ResultsError, match="follow from its raw samples"):
        read(written.path)


@pytest.mark.parametrize("entry", ["status", "environment", "cases", "started"])
@pytest.mark.parametrize("value", [None, [None], 3])
def test_a_document_that_lacks_something_is_refused(written, entry, value):
    document = {**json.loads(written.path.read_text()), entry: value}
    written.path.write_text(dumps(document))
    with pytest.raises(ResultsError, match="Expected a whole document"):
        read(written.path)


def test_no_nan_is_written(tmp_path):
    results = Results(tmp_path, [], ENVIRONMENT)
    with pytest.raises(ValueError, match="JSON compliant"):
        results.add({"value": float("nan")})
    results.end("complete")
    assert read(results.path)["cases"] == []
