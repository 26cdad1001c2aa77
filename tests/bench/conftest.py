import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_nvml import fake_nvml

from tfopt.bench import run as run_module
from tfopt.bench.cases import Scale
from tfopt.bench.results.run_file import dumps, read

__all__ = ["fake_nvml"]

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "cpu.json"
TINY = Scale(batch_size=32, width=1, steps=4, photos=64, resnet=None, seeds=(0,), repeats=6)


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """A small run of every suite, made now: the run and its file. It takes minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return run_module.run([], tmp_path_factory.mktemp("results"), scale=TINY)


@pytest.fixture(scope="session", params=["kept", pytest.param("fresh", marks=pytest.mark.campaign)])
def recorded(request, tmp_path_factory):
    """A real run of every suite, kept in the repository or made now: the run and its file."""
    if request.param == "fresh":
        return request.getfixturevalue("fresh")
    path = Path(shutil.copy(KEPT, tmp_path_factory.mktemp("kept")))
    return SimpleNamespace(path=path, run=read(path))


@pytest.fixture(scope="session")
def recorded_run(recorded):
    """That run, read back."""
    return read(recorded.path)


@pytest.fixture(scope="session")
def document(recorded_run):
    """That run as JSON values."""
    return json.loads(dumps(recorded_run))
