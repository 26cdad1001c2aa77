"""Workers that save to one path, one of them in the middle of writing when another reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfopt import repairs
from tfopt.internals.sources import find

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.slow
@pytest.mark.parametrize("which", ["stock", "repaired"])
def test_a_reader_finds_a_whole_file(which, tmp_path):
    command = [sys.executable, "-m", "tfopt.distribute.launch", "-n", "2", SUPPORT / "shared_files.py", tmp_path, which]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
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
