"""Copies of the installed Keras that no release is: other text, everything mended, a method under another name.

    python other_keras.py FOLDER text|mended|moved [CODE]

makes a copy in the folder and, with it in front of the installed one, runs the code in a new process.
"""

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MENDING = """
import functools
import sys

from tfopt import repairs
from tfopt.internals.sources import find

for repair in repairs.REPAIRS.values():
    for target, make in () if repair.is_absent else repair.replace.items():
        owner, name = find(target)
        before = getattr(owner, name)
        function = before.fget if isinstance(before, property) else before
        after = functools.wraps(function)(make(function))
        after = after if function is before else property(after)
        setattr(owner, name, after)
        for module in list(sys.modules.values()):
            for alias in [alias for alias, value in list(vars(module).items()) if value is before]:
                setattr(module, alias, after)
"""


def copied(folder: Path) -> Path:
    """A copy of the installed Keras."""
    source = Path(importlib.util.find_spec("keras").origin).parent
    shutil.copytree(source, folder / "keras", ignore=shutil.ignore_patterns("__pycache__"))
    for info in source.parent.glob("keras-*.dist-info"):
        shutil.copytree(info, folder / info.name)
    return folder / "keras"


def with_other_text(folder: Path, targets: list[str]) -> None:
    """Gives each of these functions of Keras a local name that it does not need."""
    copied(folder)
    by_module: dict[str, list[str]] = {}
    for target in targets:
        module, _, path = target.partition(":")
        if module.startswith("keras."):
            by_module.setdefault(module, []).append(path)
    for module, paths in by_module.items():
        parts = folder / Path(*module.split("."))
        file = parts.with_suffix(".py") if parts.with_suffix(".py").exists() else parts / "__init__.py"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        tree = ast.parse("".join(lines))
        places = {}
        for path in paths:
            found = tree
            for name in path.split("."):
                inside = (one for one in ast.walk(found) if isinstance(one, ast.ClassDef | ast.FunctionDef))
                found = next((one for one in inside if one.name == name), None)
                if found is None:
                    break
            if found is not None:  # else it comes from another module, or a base class
                first = next(one for one in found.body if not _is_docstring(one))
                begin = min(part.lineno for part in (first, *getattr(first, "decorator_list", ())))
                places[begin] = " " * first.col_offset + "of_another_release = None\n"
        for line in sorted(places, reverse=True):
            lines.insert(line - 1, places[line])
        file.write_text("".join(lines), encoding="utf-8")


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def with_all_mended(folder: Path, targets: list[str]) -> None:
    """Mends every defect that tfopt repairs, when Keras is imported, and gives these functions other text."""
    with_other_text(folder, targets)
    package = folder / "keras"
    (folder / "mended_upstream.py").write_text(MENDING, encoding="utf-8")
    with (package / "__init__.py").open("a", encoding="utf-8") as file:
        file.write("\nimport mended_upstream\n")


def with_a_method_moved(folder: Path, name: str, other: str) -> None:
    """Calls a method of Keras by another name, wherever it is used."""
    for file in copied(folder).rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if name in text:
            file.write_text(re.sub(rf"\b{name}\b", other, text), encoding="utf-8")


def run(folder: Path, code: str, **environment: str) -> str:
    """Runs code with the copy; returns what it prints."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    environ = os.environ | {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""} | environment
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
