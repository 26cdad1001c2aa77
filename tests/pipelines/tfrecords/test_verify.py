import builtins
import json
import os
import random
import shutil

import pytest

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.problems import Problem
from tfopt.pipelines.tfrecords.format import INDEX_NAME
from tfopt.pipelines.tfrecords.verify import RecordsReport, verify_records

RECORDS = [b"first", b"", b"third " * 9]
STARTS = [0, 21, 37, 107]


def kinds(report):
    return [(os.path.basename(problem.file), problem.kind) for problem in report.problems]


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_a_whole_folder_passes(shards, compression):
    report = verify_records(shards(compression))
    assert report.passed
    assert report == RecordsReport(3, (), True)
    assert str(report) == "3 files of records: as the index says"


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_every_flipped_byte_of_every_file_is_found(shards, flip, compression):
    folder = shards(compression)
    for name in os.listdir(folder):
        path = folder / name
        size = path.stat().st_size
        for position in range(0, size, 1 if name != INDEX_NAME else 13):
            flip(path, position, bit=position % 8)
            report = verify_records(folder)
            assert not report.passed
            assert (name, "index" if name == INDEX_NAME else "altered") in kinds(report)
            assert {name} == {file for file, _ in kinds(report)}
            flip(path, position, bit=position % 8)
    assert verify_records(folder).passed


@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_every_cut_of_a_shard_is_found(shards, compression):
    folder = shards(compression)
    path = sorted(folder.iterdir())[1]
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        report = verify_records(folder)
        assert (path.name, "cut" if length else "empty") in kinds(report)
        assert {path.name} == {file for file, _ in kinds(report)}


def test_a_cut_between_records_says_where(shards):
    folder = shards()
    path = sorted(folder.iterdir())[1]
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])  # two records of one size
    (problem,) = verify_records(folder).problems
    assert problem == Problem(
        str(path),
        "cut",
        f"{len(whole) // 2} bytes, but the index says {len(whole)}",
        offset=len(whole) // 2,
    )


def test_missing_extra_longer_and_exchanged_files(shards):
    folder = shards()
    index, first, second, third = sorted(folder.iterdir())
    assert index.name == INDEX_NAME
    third.write_bytes(third.read_bytes() + first.read_bytes())
    (folder / "notes").mkdir()
    shutil.copy(first, second)
    first.unlink()
    assert sorted(kinds(verify_records(folder))) == [
        ("notes", "extra"),
        (first.name, "missing"),
        (second.name, "altered"),
        (third.name, "longer"),
    ]


def test_an_altered_shard_says_which_record(shards, flip):
    folder = shards()
    path = sorted(folder.iterdir())[1]
    size = path.stat().st_size // 2
    flip(path, size + 15)
    (problem,) = verify_records(folder).problems
    assert (problem.record, problem.offset, problem.size_bytes) == (1, size, size)
    assert str(problem) == (
        f"altered: {path}: record 1, counted from 0 (bytes {size} to {2 * size}): its data, or the checksum of it, "
        "is altered"
    )


def test_shards_are_still_checked_where_the_index_is_damaged(shards, flip):
    folder = shards()
    flip(folder / INDEX_NAME, 5)
    shard = sorted(folder.iterdir())[2]
    flip(shard, 20)
    report = verify_records(folder)
    assert kinds(report) == [(INDEX_NAME, "index"), (shard.name, "altered")]
    assert not report.indexed


@pytest.mark.slow
def test_files_without_an_index(plain_file, flip, tmp_path):
    path = plain_file(RECORDS)
    plain_file(RECORDS, "b.tfrecord")
    for paths in (tmp_path, str(tmp_path / "*.tfrecord"), [path, tmp_path / "b.tfrecord"]):
        report = verify_records(paths)
        assert (report.passed, report.files, report.indexed) == (True, 2, False)
        assert str(report) == (
            "2 files of records: every checksum matches; without an index, a cut between two records or a missing file "
            "goes unnoticed"
        )
    for position in range(STARTS[-1]):
        flip(path, position)
        assert kinds(verify_records(tmp_path)) == [("a.tfrecord", "altered")]
        flip(path, position)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = kinds(verify_records(tmp_path))
        assert found == ([] if length in STARTS[1:] else [("a.tfrecord", "cut" if length else "empty")])


@pytest.mark.parametrize("compression", ["GZIP", "ZLIB"])
def test_compressed_files_without_an_index(plain_file, compression):
    path = plain_file(RECORDS, compression=compression)
    told = None if compression == "GZIP" else compression
    assert verify_records(path, compression=told).passed
    whole = path.read_bytes()
    for length in range(12, len(whole)):
        path.write_bytes(whole[:length])
        assert kinds(verify_records(path, compression=told)) == [("a.tfrecord", "cut")]


def test_files_named_one_by_one_use_the_index_beside_them(shards):
    folder = shards()
    path = sorted(folder.iterdir())[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    report = verify_records([path])
    assert report.indexed
    assert kinds(report) == [(path.name, "cut")]


def test_a_file_that_cannot_be_read(shards, monkeypatch):
    # Permissions do not bind the user root, so the operating system's answer is given here.
    folder = shards()
    path = sorted(folder.iterdir())[1]
    opened = builtins.open

    def refuse(file, *arguments, **options):
        if str(file) == str(path):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments, **options)

    monkeypatch.setattr(builtins, "open", refuse)
    assert kinds(verify_records(folder)) == [(path.name, "unreadable")]


def test_a_folder_in_the_place_of_a_file(shards):
    folder = shards()
    path = sorted(folder.iterdir())[1]
    path.unlink()
    path.mkdir()
    (problem,) = verify_records(folder).problems
    assert (problem.file, problem.kind) == (str(path), "unreadable")


def test_the_report_is_json_and_reads_well():
    problems = tuple(Problem("f", "cut", f"at {number}", number, 7, 3) for number in range(22))
    report = RecordsReport(1, problems, False)
    assert json.loads(json.dumps(report.to_dict()))["problems"][3] == {
        "file": "f",
        "kind": "cut",
        "what": "at 3",
        "record": 3,
        "offset": 7,
        "size_bytes": 3,
    }
    assert report.to_dict()["passed"] is False
    lines = str(report).splitlines()
    assert lines[0].startswith("1 file of records: 22 problems; without an index")
    assert lines[1] == "  cut: f: at 0"
    assert lines[-1] == "  and 2 more"


def test_there_must_be_something_to_verify(tmp_path):
    with pytest.raises(PipelineError, match=r"files of records in .* There are none"):
        verify_records(tmp_path)
    with pytest.raises(PipelineError, match="Nothing matches"):
        verify_records(tmp_path / "nothing")
    with pytest.raises(ValueError, match="'GZIP' or 'ZLIB'"):
        verify_records(tmp_path, compression="gzip")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed < 5 else pytest.mark.campaign) for seed in range(50)]
)
def test_any_change_of_any_file_is_found(shards, seed):
    folder, draw = shards(random.Random(seed).choice([None, "GZIP", "ZLIB"])), random.Random(seed)
    path = draw.choice(sorted(folder.iterdir()))
    contents = bytearray(path.read_bytes())
    start, end = sorted(draw.choices(range(len(contents) + 1), k=2))
    changed = contents[:start] + draw.randbytes(draw.randrange(9)) + contents[end:]
    path.write_bytes(changed)
    assert verify_records(folder).passed == (changed == contents)


def test_a_shard_that_is_missing_beside_the_given_ones_is_found(shards):
    folder = shards()
    first, second, _ = sorted(folder.glob("*.tfrecord"))
    assert verify_records([first]).passed
    second.unlink()
    for paths in (str(folder / "*.tfrecord"), [first]):
        assert kinds(verify_records(paths)) == [(second.name, "missing")]


@pytest.mark.parametrize("contents", [b"", b"\0" * 50])
def test_an_index_that_was_emptied_is_found(shards, contents):
    folder = shards()
    (folder / INDEX_NAME).write_bytes(contents)
    for paths in (folder, str(folder / "*.tfrecord")):
        report = verify_records(paths)
        assert kinds(report) == [(INDEX_NAME, "index")]
        assert report.files == 3


def test_paths_of_another_type_are_refused():
    with pytest.raises(
        TypeError, match=r"^Expected a path, a glob or a list of paths of records\. Received: None\. Pass"
    ):
        verify_records(None)
