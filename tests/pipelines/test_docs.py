"""The snippets of docs/pipelines.md run as they stand, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8"), re.S)


def test_the_snippets_run(tmp_path, picture):
    for number in range(9):
        picture(tmp_path / "photos" / "train" / "abc"[number % 3] / f"{number}.png")
    script = tmp_path / "snippets.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(SNIPPETS))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    for shown in (
        "Training pipeline over arrays",
        "[1.25 1.25 1.25 1.25 0.  ]",
        "asked for",
        "reads a variable",
        "NumPy",
    ):
        assert shown in result.stdout
