import contextlib
import json

import pytest
from fake_nvml import fake_nvml

from tfopt.bench import run as run_module
from tfopt.bench.cases import Scale
from tfopt.bench.results.run_file import dumps, read

__all__ = ["fake_nvml"]

TINY = Scale(batch_size=32, width=1, steps=4, photos=64, resnet=None, seeds=(0,), repeats=2)


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A real run of every suite, small: the run and its file."""
    folder = tmp_path_factory.mktemp("results")
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    with contextlib.closing(_Undo(patch)):
        yield run_module.run([], folder, scale=TINY)


class _Undo:
    def __init__(self, patch):
        self.close = patch.undo


@pytest.fixture(scope="session")
def recorded_run(recorded):
    """That run, read back."""
    return read(recorded.path)


@pytest.fixture(scope="session")
def document(recorded_run):
    """That run as JSON values."""
    return json.loads(dumps(recorded_run))
