import copy
import json
import math
from dataclasses import replace

import pytest

from tfopt.bench.results import UNDER_WAY, CaseResult, Check, VariantResult
from tfopt.bench.results.run_file import RunFile, dumps, read, to_json
from tfopt.errors import ResultsError
from tfopt.measure import StepTimes

ENVIRONMENT = {"tfopt": "0", "packages": {}, "gpus": [], "host": {"cpu_model": None, "cpus": 2.0}}


def times(*turns_ms):
    return StepTimes(repeats_ms=turns_ms, steps_per_sample=5, first_step_seconds=1.0)


def case(**fields):
    named = {"suite": "xla", "workload": "digits", "question": "?", "unit": "step", "baseline": "off"}
    off = VariantResult(name="off", times=times(*[(4.0, 4.1), (4.2, 4.0)] * 3))
    on = VariantResult(name="on", times=times(*[(2.0, 2.1), (2.2, 2.0)] * 3))
    return CaseResult(**{**named, "variants": (off, on), **fields})


@pytest.fixture
def written(tmp_path):
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    file.put(case().with_metrics())
    file.end("complete")
    return file


def test_what_was_written_is_read_back(written):
    assert read(written.path) == written.run
    assert [v.metrics.verdict for v in written.run.cases[0].variants] == ["baseline", "faster"]


@pytest.mark.parametrize("extra", [{}, {"peak_memory_mib": None}, {"peak_memory_mib": 17.5, "recommended": True}])
def test_what_older_runs_lack_may_be_missing(written, extra):
    document = to_json(written.run)
    del document["small"], document["resumed"]
    (found,) = document["cases"]
    for name in ("planned_turns", "limit", "operations_per_example", "ceilings", "gate", "communication", "unfinished"):
        del found[name]
    newer = ("refused", "recommended", "ceiling", "dtype", "peak_memory_mib", "conditions", "of_ceiling")
    for variant in found["variants"]:
        for name in (*newer, "mfu_percent", "joules_per_thousand_examples"):
            del variant[name]
    found["variants"][1].update(extra)
    written.path.write_text(json.dumps(document))
    on = read(written.path).cases[0].variants[1]
    assert on == replace(written.run.cases[0].variants[1], **extra)


def test_every_case_is_on_the_disk_at_once(tmp_path):
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    assert read(file.path).status == "running"
    file.put(case().with_metrics())
    assert len(read(file.path).cases) == 1


def test_runs_of_one_second_do_not_overwrite_each_other(tmp_path):
    paths = {RunFile.create(tmp_path, [], {}).path for _ in range(3)}
    assert len(paths) == 3


def test_a_case_under_way_is_read_with_its_figures(tmp_path):
    """On disk it has raw samples alone: figures would be worked out again after each turn."""
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    started = case(unfinished=UNDER_WAY, planned_turns=6)
    waiting = VariantResult(name="waiting")
    file.put(replace(started, variants=(*started.variants, waiting)))
    assert "verdict" not in file.path.read_text()
    (found,) = read(file.path).cases
    assert [v.metrics and v.metrics.verdict for v in found.variants] == ["baseline", "faster", None]
    file.end("interrupted")
    (ended,) = read(file.path).cases
    assert (ended.unfinished, ended.variants) == ("the run was interrupted", found.variants)


def test_turns_of_a_round_cut_short_are_compared_in_pairs(tmp_path):
    """The third turn of the baseline, twice as slow, has no partner."""
    off = VariantResult(name="off", times=times((4.0, 4.0), (4.0, 4.0), (8.0, 8.0)))
    on = VariantResult(name="on", times=times((2.0, 2.0), (2.0, 2.0)))
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    file.put(case(variants=(off, on), unfinished="cut").with_metrics())
    assert read(file.path).cases[0].variants[1].metrics.comparison.ratio == 2.0


def test_a_refused_variant_is_read_back(tmp_path):
    refused = VariantResult(name="on", refused="no such device")
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    file.put(case(variants=(case().variants[0], refused)).with_metrics())
    (found,) = read(file.path).cases
    assert found.done
    assert found.variants[1] == refused


def test_without_a_baseline_nothing_is_compared(tmp_path):
    refused = VariantResult(name="off", refused="no such device")
    file = RunFile.create(tmp_path, ["xla"], ENVIRONMENT)
    file.put(case(variants=(refused, case().variants[1])).with_metrics())
    metrics = read(file.path).cases[0].variants[1].metrics
    assert (metrics.verdict, metrics.comparison) == ("not compared", None)


@pytest.mark.parametrize("keep", [0, 1, 50, -2])
def test_a_cut_file_is_refused(written, keep):
    text = written.path.read_text()
    written.path.write_text(text[:keep])
    with pytest.raises(ResultsError, match=r"truncated or not JSON.*or run it again"):
        read(written.path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[]", b"3", b'{"schema": "other"}'])
def test_another_file_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ResultsError, match=r"Expected a results file of tfopt-bench\. Found.*Give a file"):
        read(tmp_path / "x.json")


def test_a_missing_file_or_folder_is_refused(tmp_path):
    for path, found in ((tmp_path / "none.json", "No such file: "), (tmp_path, "is a folder")):
        with pytest.raises(ResultsError, match=found) as raised:
            read(path)
        assert "Errno" not in str(raised.value)


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused(written, version):
    document = {**json.loads(written.path.read_text()), "schema_version": version}
    written.path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match=f"Expected schema version 1. Found {version!r}"):
        read(written.path)


def edited(run, change):
    document = copy.deepcopy(json.loads(dumps(run)))
    change(document["cases"][0])
    return json.dumps(document)


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
    written.path.write_text(edited(written.run, change))
    with pytest.raises(ResultsError, match="follow from its raw samples"):
        read(written.path)


@pytest.mark.parametrize("entry", ["status", "environment", "cases", "started"])
@pytest.mark.parametrize("value", [None, [None], 3])
def test_a_document_that_lacks_something_is_refused(written, entry, value):
    document = {**json.loads(written.path.read_text()), entry: value}
    written.path.write_text(json.dumps(document))
    with pytest.raises(ResultsError, match="Expected a whole document"):
        read(written.path)


def test_no_nan_is_written(tmp_path):
    file = RunFile.create(tmp_path, [], ENVIRONMENT)
    check = Check(what="loss", values=(math.nan,), passed=False, text="nan")
    off, on = case().variants
    with pytest.raises(ValueError, match="JSON compliant"):
        file.put(case(variants=(off, replace(on, check=check))).with_metrics())
    file.end("complete")
    assert read(file.path).cases == ()
