"""Workers that save to one path, one of them in the middle of writing when another reads."""

import json

import pytest
from trained_apart import ended, start

from tfopt import repairs
from tfopt.internals.sources import find


@pytest.mark.slow
@pytest.mark.parametrize("which", ["stock", "repaired"])
def test_a_reader_finds_a_whole_file(which, tmp_path):
    ended(start("shared_files.py", tmp_path, which, workers=2))
    found = json.loads((tmp_path / "found0.json").read_text())
    errors = ["ValueError", "OSError"]  # no archive; an HDF5 file that another process has open
    assert found == {"read": 3 * (errors if which == "stock" else [True, True]), "left": []}
    assert not (tmp_path / "backup").exists()


def test_a_folder_is_made_and_removed_by_whoever_comes_first(tmp_path):
    repairs.install("shared_files")
    file_utils, _ = find("keras.src.utils.file_utils:makedirs")
    folder, file = tmp_path / "folder", tmp_path / "file"
    file.touch()
    for _ in range(2):
        file_utils.makedirs(folder)
    with pytest.raises(FileExistsError):
        file_utils.makedirs(file)
    for _ in range(2):
        file_utils.rmtree(folder)
    assert not folder.exists()
