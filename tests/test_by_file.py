import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick import campaign, first_quick

CONFTEST = """
from by_file import ByFile

def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""
DIES = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(1)\n"
PASSES = "def test_passes(): pass\n"


@pytest.mark.parametrize("after", first_quick([1], 0) + campaign([0, 3]))
def test_the_tests_behind_one_that_kills_its_worker_run_once(tmp_path, after):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_dies.py").write_text(DIES + "".join(f"def test_{n}(): pass\n" for n in range(after)))
    for name in "abc":
        (tmp_path / f"test_{name}.py").write_text(PASSES)
    support = str(Path(__file__).parent / "support")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([support, *sys.path])}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "-c", "/dev/null", "."]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert f"1 failed, {4 + after} passed" in run.stdout, run.stdout
