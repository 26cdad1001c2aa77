import importlib.metadata
import json
import sys

import pytest

from tfopt.pipelines.cache.fingerprint import fingerprint, modules
from tfopt.pipelines.cache.fingerprint.modules import by_name, package_of


def test_pythons_own_modules_count_by_its_version():
    version = f"CPython {'.'.join(map(str, sys.version_info[:3]))}"
    for module in ("builtins", "sys", "math", "os", "os.path", "json.decoder", "importlib._bootstrap", "antigravity"):
        assert package_of(module) == version


@pytest.mark.parametrize(
    ("module", "name"),
    [("numpy", "numpy"), ("numpy.linalg", "numpy"), ("google.protobuf", "protobuf"), ("absl.flags", "absl-py")],
)
def test_installed_modules_count_by_release_and_files(module, name):
    found = package_of(module)
    assert f"{name} {importlib.metadata.version(name)} " in found
    assert len(found.split()[-1]) == 64


def test_the_users_modules_are_no_package(tmp_path, monkeypatch):
    (tmp_path / "own_module.py").write_text("raise AssertionError('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("own_module", "__main__", __name__, "", "no_such_module"):
        assert package_of(module) is None


def test_a_name_on_loan_does_not_count():
    def loan():
        pass

    assert by_name(json.dumps)
    loan.__module__, loan.__qualname__ = "json", "dumps"
    assert not by_name(loan)


@pytest.mark.slow
@pytest.mark.parametrize("packages", ["lib/site-packages", "chosen"])  # the other one: pip install --target
def test_a_package_installed_again_with_other_code_counts_as_another(packages, tmp_path, monkeypatch):
    """In folders laid out as pip leaves them; a loose file that no package lists counts by its code."""

    def install(folder, digest):
        site = tmp_path / folder / packages
        info = site / "own_package-1.0.dist-info"
        info.mkdir(parents=True)
        (site / "own_package").mkdir()
        (site / "own_package" / "__init__.py").write_text("def scale(x): return x")
        (site / "loose.py").write_text("")
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-package\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"own_package/__init__.py,sha256={digest},22\n../../bin/own,sha256={folder},9\n")
        modules._installed.cache_clear()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(site)
            patch.delitem(sys.modules, "own_package", raising=False)
            module = importlib.import_module("own_package")
            assert package_of("loose") is None
            return package_of("own_package"), fingerprint(module.scale, name="f")

    first, same, other = install("a", "one"), install("b", "one"), install("c", "two")
    assert first[0].startswith("own-package 1.0 ")
    assert first == same
    assert first[0] != other[0]
    assert first[1] != other[1]
