import pytest

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.paths import file_stamps


@pytest.fixture
def paths(tmp_path):
    for number in range(600):
        (tmp_path / f"{number:03}.txt").write_text("x" * number)
    return sorted(tmp_path.iterdir())


def test_files_are_told_by_path_size_and_time_in_the_order_given(paths, monkeypatch):
    expected = [[str(path), number, path.stat().st_mtime_ns] for number, path in enumerate(paths)]
    assert file_stamps(reversed(paths)) == expected[::-1]
    monkeypatch.chdir(paths[0].parent)
    assert file_stamps(["003.txt"]) == [expected[3]]  # another than the same path elsewhere


def test_remote_files_are_asked_through_tensorflow(tmp_path):
    path = tmp_path / "file"
    path.write_text("abc")
    # The scheme of local files, which TensorFlow opens as it opens those of a cloud.
    ((name, size, time),) = file_stamps([f"file://{path}"])
    assert (name, size) == (f"file://{path}", 3)
    assert abs(time - path.stat().st_mtime_ns) < 10**9


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_what_is_no_file_is_refused(tmp_path, scheme):
    with pytest.raises(PipelineError, match=r"Expected a file at .*none'\. Found none: .*Check the path"):
        file_stamps([f"{scheme}{tmp_path}/none"])
    with pytest.raises(PipelineError, match=r"Expected a file at '.+'\. Found a folder\. Pass the files in it"):
        file_stamps([f"{scheme}{tmp_path}"])
