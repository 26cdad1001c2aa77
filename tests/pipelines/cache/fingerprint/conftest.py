import importlib.util
import itertools
import sys

import pytest

from tfopt.pipelines.cache.fingerprint import fingerprint


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Writes source to a file of its own and imports it under a name, by default another one each time."""
    numbers = itertools.count()

    def write(source, name=None):
        name = name or f"user_module_{next(numbers)}"
        path = tmp_path / f"folder_{next(numbers)}" / f"{name}.py"
        path.parent.mkdir()
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return write


@pytest.fixture(scope="session")
def prints():
    """Returns the fingerprint of a value."""
    return lambda value: fingerprint(value, name="transform")
