import builtins
import json
import os
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


@pytest.fixture
def second(shards):
    """The second of three shards in a folder with an index, of two records of one size."""
    return sorted(shards().iterdir())[2]


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_a_whole_folder_passes(shards, compression):
    report = verify_records(shards(compression))
    assert report == RecordsReport(3, (), True)
    assert (report.passed, str(report)) == (True, "3 files of records: as the index says")


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "GZIP"])
def test_every_flipped_byte_of_every_file_is_found(shards, flip, compression):
    folder = shards(compression)
    for name in os.listdir(folder):
        path = folder / name
        for position in range(0, path.stat().st_size, 1 if name != INDEX_NAME else 13):
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


def test_a_cut_between_records_says_where(second):
    size = second.stat().st_size
    os.truncate(second, size // 2)
    what = f"{size // 2} bytes, but the index says {size}"
    assert verify_records(second.parent).problems == (Problem(str(second), "cut", what, offset=size // 2),)
    report = verify_records([second])  # one by one, files use the index beside them
    assert (report.indexed, kinds(report)) == (True, [(second.name, "cut")])


def test_an_altered_shard_says_which_record(second, flip):
    size = second.stat().st_size // 2
    flip(second, size + 15)
    (problem,) = verify_records(second.parent).problems
    assert (problem.record, problem.offset, problem.size_bytes) == (1, size, size)
    assert str(problem) == (
        f"altered: {second}: record 1, counted from 0 (bytes {size} to {2 * size}): its data, or the checksum of it, "
        "is altered"
    )


def test_missing_extra_longer_and_exchanged_files(shards):
    folder = shards()
    index, first, second, third = sorted(folder.iterdir())
    assert index.name == INDEX_NAME
    third.write_bytes(third.read_bytes() + first.read_bytes())
    (folder / "notes").mkdir()
    shutil.copy(first, second)
    assert verify_records([first]).passed
    first.unlink()
    assert sorted(kinds(verify_records(folder))) == [
        ("notes", "extra"),
        (first.name, "missing"),
        (second.name, "altered"),
        (third.name, "longer"),
    ]
    for paths in (str(folder / "*.tfrecord"), [second]):  # a shard that is missing beside the given ones
        assert (first.name, "missing") in kinds(verify_records(paths))


@pytest.mark.parametrize("contents", [None, b"", b"\0" * 50])
def test_shards_are_still_checked_where_the_index_is_damaged(second, flip, contents):
    index = second.parent / INDEX_NAME
    if contents is None:
        flip(index, 5)
    else:
        index.write_bytes(contents)
    flip(second, 20)
    for paths in (second.parent, str(second.parent / "*.tfrecord")):
        report = verify_records(paths)
        assert kinds(report) == [(INDEX_NAME, "index"), (second.name, "altered")]
        assert (report.files, report.indexed) == (3, False)


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


def test_a_file_that_cannot_be_read(second, monkeypatch):
    # Permissions do not bind the user root, so the operating system's answer is given here.
    opened = builtins.open

    def refuse(file, *arguments, **options):
        if str(file) == str(second):
            raise PermissionError(13, "Permission denied", str(file))
        return opened(file, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", refuse)
        assert kinds(verify_records(second.parent)) == [(second.name, "unreadable")]
    second.unlink()
    second.mkdir()
    assert kinds(verify_records(second.parent)) == [(second.name, "unreadable")]


def test_the_report_is_json_and_reads_well():
    problems = tuple(Problem("f", "cut", f"at {number}", number, 7, 3) for number in range(22))
    report = RecordsReport(1, problems, False)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["problems"][3] == {
        "file": "f",
        "kind": "cut",
        "what": "at 3",
        "record": 3,
        "offset": 7,
        "size_bytes": 3,
    }
    assert found["passed"] is False
    lines = str(report).splitlines()
    assert lines[0].startswith("1 file of records: 22 problems; without an index")
    assert (lines[1], lines[-1]) == ("  cut: f: at 0", "  and 2 more")


def test_there_must_be_something_to_verify(tmp_path):
    with pytest.raises(PipelineError, match=r"files of records in .* There are none"):
        verify_records(tmp_path)
    with pytest.raises(PipelineError, match="Nothing matches"):
        verify_records(tmp_path / "nothing")
    with pytest.raises(ValueError, match="'GZIP' or 'ZLIB'"):
        verify_records(tmp_path, compression="gzip")
    with pytest.raises(TypeError, match=r"^Expected a path, a glob or a list of paths of .*\. Received: None\. Pass"):
        verify_records(None)
