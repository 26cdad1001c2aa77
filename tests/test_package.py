"""What is installed: every package, every file once, and nothing heavy on import."""

import ast
import collections
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import pytest

import tfopt

ROOT = Path(__file__).parents[1]
HEAVY = ("tensorflow", "keras", "numpy", "pynvml", "sklearn", "rich", "jinja2", "psutil")
FOLDERS = {"tfopt": ROOT / "tfopt", "tfopt.callbacks": ROOT / "callbacks", "tfopt.pipelines": ROOT / "pipelines"}


def listed():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return set(config["options"]["packages"].split())


def test_every_folder_with_code_is_a_listed_package():
    found = set()
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = file.parent.relative_to(folder).parts
            if "__pycache__" not in parts:
                found.add(".".join((package, *parts)))
    assert found == listed()


def test_the_links_lead_to_the_folders():
    for name in ("callbacks", "pipelines"):
        link = ROOT / "tfopt" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """A wheel and an sdist, built from a copy of the sources."""
    copy = tmp_path_factory.mktemp("build") / "tfopt"
    left_out = shutil.ignore_patterns(".git", "build", "dist", "*.egg-info", "__pycache__", ".*cache", ".venv", ".gpu")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=left_out)
    code = "import setuptools.build_meta as b, json;print(json.dumps([b.build_wheel('dist'), b.build_sdist('dist')]))"
    output = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr[-2000:]
    wheel, sdist = json.loads(output.stdout.splitlines()[-1])
    return copy / "dist" / wheel, copy / "dist" / sdist


def sources():
    """Every file to be installed, as it should stand in the wheel."""
    names = []
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*"):
            inside = file.relative_to(folder)
            linked = any(parent.is_symlink() for parent in [file, *file.parents] if folder in parent.parents)
            if file.is_file() and not linked and "__pycache__" not in inside.parts:
                names.append("/".join((*package.split("."), *inside.parts)))
    return names


@pytest.mark.slow
def test_every_file_lands_in_the_wheel_once(built):
    with zipfile.ZipFile(built[0]) as wheel:
        installed = [name for name in wheel.namelist() if ".dist-info/" not in name]
        assert sorted(installed) == sorted(sources())
        entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "tfopt-bench = tfopt.bench.cli:main" in wheel.read(entry_points).decode()


@pytest.mark.slow
def test_the_wheel_can_be_built_from_the_sdist(built, tmp_path):
    shutil.unpack_archive(built[1], tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    code = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    subprocess.run([sys.executable, "-c", code], cwd=unpacked, capture_output=True, check=True)
    with zipfile.ZipFile(next(unpacked.glob("*.whl"))) as wheel, zipfile.ZipFile(built[0]) as direct:
        assert wheel.namelist() == direct.namelist()


def test_the_sdist_holds_what_a_reader_needs(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    documents = [
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("docs/**/*.svg"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("*.md"),
    ]
    assert len(documents) > 20
    assert {str(document.relative_to(ROOT)) for document in documents} | {"LICENSE"} <= names


def loaded_after(code, among=HEAVY):
    """Which of these modules a fresh interpreter has loaded after some code."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([n for n in {among!r} if n in sys.modules]))"
    output = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(output.stdout.splitlines()[-1])


def test_importing_tfopt_loads_nothing_heavy():
    assert loaded_after("import tfopt") == []


def test_help_loads_nothing_heavy():
    script = "from tfopt.bench.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert loaded_after(script) == []
    assert loaded_after("from tfopt.bench.cli import main\nmain(['list'])") == []
    assert loaded_after("from tfopt.bench.cli import main\nmain(['run', 'precison'])") == []


@pytest.mark.slow
def test_a_pipeline_loads_no_other_source():
    code = "import numpy as np\nfrom tfopt.pipelines import build_pipeline\nbuild_pipeline(np.zeros(9), batch_size=3)"
    assert loaded_after(code, ["tensorflow_datasets"]) == []


@pytest.mark.slow
def test_a_callback_loads_what_it_uses():
    loggers = "from tfopt.callbacks import ThroughputLogger as T, UtilizationAlert as A, UtilizationLogger as U"
    others = ["tfopt.fit", "tfopt.pipelines", "tfopt.precision", "tfopt.xla", "jinja2", "tensorboard"]
    assert loaded_after(f"{loggers}\nU(), T(), A()", others) == []


@pytest.mark.parametrize("name", tfopt.__all__)
def test_every_public_name_resolves(name):
    found = getattr(tfopt, name)
    if not isinstance(found, types.ModuleType):
        assert callable(found)
        assert found.__name__ == name
        return
    assert found.__name__ == f"tfopt.{name}"
    for public in getattr(found, "__all__", ()):
        assert getattr(found, public) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="tfopt attribute diagnosed"):
        _ = tfopt.diagnosed
    assert set(tfopt.__all__) <= set(dir(tfopt))
    with pytest.raises(AttributeError, match=r"tfopt\.callbacks attribute Logger"):
        _ = tfopt.callbacks.Logger
    assert set(tfopt.callbacks.__all__) <= set(dir(tfopt.callbacks))


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("overlap", "tfopt.fit.overlap"),
        ("set_policy", "tfopt.precision.set_policy"),
        ("build_pipeline", "tfopt.pipelines.build_pipeline"),
        ("use_flash_attention", "tfopt.kernels.use_flash_attention"),
    ],
)
def test_a_name_of_one_of_its_packages_is_pointed_out(name, homes):
    with pytest.raises(AttributeError, match=rf"^No tfopt attribute {name}\. Did you mean {re.escape(homes)}\?$"):
        getattr(tfopt, name)
    code = f"import tfopt\ntry: tfopt.{name}\nexcept AttributeError: pass"
    assert loaded_after(code, (*HEAVY, homes.rpartition(".")[0])) == []


def test_every_name_of_every_package_is_pointed_out():
    packages = [one for name in tfopt.__all__ if isinstance(one := getattr(tfopt, name), types.ModuleType)]
    for package in packages:
        for name in {*getattr(package, "__all__", ())} - {*tfopt.__all__, "files"}:  # tfopt.files is a module
            if not isinstance(getattr(package, name), types.ModuleType):
                with pytest.raises(AttributeError, match=rf"{re.escape(package.__name__)}\.{name}\b"):
                    getattr(tfopt, name)


def test_both_ways_to_call_the_command_are_the_same():
    command = [sys.executable, "-c", "import sys; from tfopt.bench.cli import main; sys.exit(main())"]
    outputs = [
        subprocess.run([*start, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for start in (command, [sys.executable, "-m", "tfopt.bench"])
    ]
    assert outputs[0] == outputs[1]


FLOORS = [
    {"bench"},
    {"diagnosis"},
    {"callbacks"},
    {"checkpoint"},
    {"fit", "distribute"},
    {"batch", "compress"},
    {"pipelines", "precision", "xla", "memory"},
    {"kernels", "repairs"},
    {"measure"},
    {"model", "causes"},
    {"hardware"},
    {"internals"},
    {"page", "processes", "files", "checks", "warn"},
    {"text"},
    {"errors"},
]


def modules():
    """Name of each module, with its file and whether it is a package."""
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            if "__pycache__" in file.parts or any(
                parent.is_symlink() for parent in file.parents if folder in parent.parents
            ):
                continue
            parts = file.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            yield ".".join((package, *parts[: len(parts) - is_package])), file, is_package


def imports():
    """Pairs of modules, of which the first imports the second, anywhere in its code."""
    known = {name for name, _, _ in modules()}
    for name, file, _ in modules():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found = []
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [one if one in known else node.module for one in found]
            elif isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            yield from ((name, one) for one in found if one in known and one != name)


@pytest.mark.slow
def test_imports_go_down_a_floor():
    floor = {part: number for number, parts in enumerate(FLOORS) for part in parts}
    for name, imported in imports():
        own, other = (module.split(".")[1] if "." in module else None for module in (name, imported))
        if own in floor and other in floor and own != other:
            assert floor[other] > floor[own], f"{name} imports {imported}"


@pytest.mark.slow
def test_no_two_folders_import_each_other():
    packages = {name for name, _, is_package in modules() if is_package}

    def folder(module):
        return module if module in packages else module.rpartition(".")[0]

    pairs = {(folder(name), folder(imported)) for name, imported in imports()}
    assert not {(one, other) for one, other in pairs if one != other and (other, one) in pairs}


def test_a_folder_has_at_most_twelve_modules():
    counts = collections.Counter(file.parent for _, file, is_package in modules() if not is_package)
    assert not {str(folder): count for folder, count in counts.items() if count > 12}


@pytest.mark.slow
def test_an_editable_install_sees_one_package(built, tmp_path):
    copy = built[0].parents[1]
    code = "import setuptools.build_meta as b, sys; print(b.build_editable(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=copy, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    script = (
        f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r})\n"
        "finder = [f for f in sys.meta_path if 'Editable' in getattr(f, '__name__', '')][-1]\n"
        "sys.meta_path.insert(0, finder)  # before a tfopt that is installed already\n"
        "import tfopt.callbacks.shared.running_fit, tfopt.pipelines.sources.source\n"
        "print(tfopt.callbacks.__file__, tfopt.pipelines.__file__, 'callbacks' in sys.modules)"
    )
    environ = {**os.environ, "PYTHONPATH": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    output = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    callbacks, pipelines, bare = output.stdout.split()
    assert Path(callbacks).resolve() == (copy / "callbacks" / "__init__.py").resolve()
    assert Path(pipelines).resolve() == (copy / "pipelines" / "__init__.py").resolve()
    assert bare == "False"
