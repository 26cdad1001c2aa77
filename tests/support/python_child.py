"""Python code in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(code, *arguments, ends_with=0, cwd=None, **environ):
    """Runs code that ends with this exit code; returns what it prints."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"} | environ
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cwd, timeout=500, check=False)
    assert ended.returncode == ends_with, ended.stderr[-4000:]
    return ended.stdout
