"""A folder of runs as one document: what is in it, what is refused, and that the repository's own follows from it."""

import copy
import html
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tfopt.bench.report import collection, formatting
from tfopt.bench.report.collection import Collection
from tfopt.errors import ResultsError

ROOT = Path(__file__).parents[3]
GPU = {"name": "NVIDIA H200"}


def line(variant, *samples_ms, device="NVIDIA H200", batch_size=32, workload="photos"):
    return {
        "workload": workload,
        "variant": variant,
        "batch_size": batch_size,
        "samples_ms": samples_ms,
        "peak_memory_mib": 1234.5,
        "torch": "2.11.0",
        "device": device,
    }


@pytest.fixture
def folder(document, tmp_path):
    """A run without a GPU and one that says it had one, with peers and another kind of file."""
    (tmp_path / "cpu.json").write_text(json.dumps(document))
    on_gpu = copy.deepcopy(document)
    on_gpu["environment"]["gpus"] = [GPU]
    (tmp_path / "h200.json").write_text(json.dumps(on_gpu))
    lines = [line("compiled", 10.0, 12.0), line("compiled", 8.0), line("eager", 20.0, device="NVIDIA A10")]
    (tmp_path / "peers.json").write_text(json.dumps(collection.peers_document(lines)))
    (tmp_path / "other.json").write_text('{"seconds": 1}')
    return tmp_path


def test_every_case_of_every_run_is_in_both(folder, recorded_run):
    found = Collection.read(folder)
    assert list(found.runs) == ["h200.json", "cpu.json"]
    text, page = collection.markdown(found, "pictures"), html.unescape(collection.page(found))
    for case in recorded_run.cases:
        assert text.count(f"### {case.suite}: {case.workload}\n") == 2
        assert page.count(f"{case.suite}: {case.workload}</h2>") == 2
        for variant in case.variants:
            row = next(row for row in formatting.table(case).rows if row[0] == formatting.name(variant))
            assert f"| {' | '.join(row)} |" in text
            assert formatting.speed(variant) in page
        for sentence in formatting.sentences(case):
            assert sentence in text
    assert "No run on a GPU" not in text + page
    assert max(len(found) for found in re.findall(r"\n{2,}", text)) == 2


def test_a_missing_gpu_is_said(folder):
    (folder / "h200.json").unlink()
    found = Collection.read(folder)
    assert "No run on a GPU is recorded yet" in collection.markdown(found, "p")
    assert "No run on a GPU is recorded yet" in collection.page(found)


def test_peers_stand_beside_the_runs_of_their_device(folder, recorded_run):
    found = Collection.read(folder)
    (case,) = [case for case in recorded_run.cases if case.suite == "stack"]
    ratio = formatting.number(case.variants[0].times.median_ms / 10.0)
    pictures = collection.pictures(found)
    assert sorted(pictures) == ["cpu-stack-photos.svg", "h200-stack-photos.svg"]
    assert f"{ratio}×" in pictures["h200-stack-photos.svg"]
    assert "PyTorch, compiled" in pictures["h200-stack-photos.svg"]
    assert "PyTorch" not in pictures["cpu-stack-photos.svg"]
    for picture in pictures.values():
        ET.fromstring(picture)
    text = collection.markdown(found, "pictures")
    assert "| photos, compiled | 10.0 | 3,200 | 1,234 | torch 2.11.0 |" in text
    assert "eager" not in text
    assert "![photos: times as fast as naive Keras](pictures/h200-stack-photos.svg)" in text
    assert "PyTorch, compiled" in collection.page(found)


@pytest.mark.parametrize("other", [{"batch_size": 64}, {"workload": "gpt2"}])
def test_peers_with_another_batch_or_workload_are_not_drawn(recorded_run, other):
    (case,) = [case for case in recorded_run.cases if case.suite == "stack"]
    assert collection.peers_bars(case, [line("compiled", 10.0, **other)]) == []
    assert len(collection.peers_bars(case, [line("compiled", 10.0)])) == 1


def test_a_case_that_failed_is_said(folder):
    changed = json.loads((folder / "cpu.json").read_text())
    for case in changed["cases"]:
        case.update(error="RuntimeError: broken", variants=[])
    (folder / "cpu.json").write_text(json.dumps(changed))
    (folder / "h200.json").unlink()
    found = Collection.read(folder)
    assert collection.markdown(found, "p").count("This case failed: RuntimeError: broken") == len(changed["cases"])
    assert collection.pictures(found) == {}
    assert "This case failed: RuntimeError: broken" in collection.page(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("cpu.json", '{"schema": "tfopt-bench", "schema_version": 1}', "Expected a whole document"),
        ("cpu.json", '{"schema": "tfopt-b', "truncated or not JSON"),
        ("peers.json", '{"schema": "tfopt-peers", "schema_version": 2, "lines": []}', "schema version 1"),
        ("peers.json", '{"schema": "tfopt-peers", "schema_version": 1, "lines": [{}]}', "KeyError"),
    ],
)
def test_a_damaged_file_is_skipped_and_named(folder, name, text, error):
    whole = Collection.read(folder)
    (folder / name).write_text(text)
    found = Collection.read(folder)
    (reason,) = found.skipped
    assert re.search(error, reason)
    assert name in reason
    assert set(found.runs) == set(whole.runs) - {name}
    assert found.peers == (whole.peers if name != "peers.json" else [])


def test_a_folder_with_the_name_of_a_file_is_skipped(folder):
    (folder / "d.json").mkdir()
    found = Collection.read(folder)
    assert found.skipped == (
        f"skipped '{folder}/d.json': Expected a JSON file. Found that it is a folder. Move it elsewhere.",
    )
    assert len(found.runs) == 2


def test_the_reason_is_given_if_nothing_is_left(tmp_path):
    (tmp_path / "cut.json").write_text('{"schema": "tf')
    with pytest.raises(ResultsError, match=r"Found none\. Skipped '.*cut\.json'.*truncated"):
        Collection.read(tmp_path)


def test_a_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ResultsError, match="Found none"):
        Collection.read(tmp_path)


def test_the_documentation_is_what_the_recorded_runs_say():
    found = Collection.read(ROOT / "benchmarks" / "results")
    shown = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert shown == collection.markdown(found, "benchmarks")
    drawn = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "benchmarks").iterdir()}
    assert drawn == collection.pictures(found)
