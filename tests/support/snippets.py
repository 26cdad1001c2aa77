"""Runs the Python snippets of a page of the documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_snippets(page, folder, **environment):
    """Runs docs/`page`'s snippets as one script in `folder`, which has to succeed, and returns what it prints."""
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.S)
    script = folder / "snippets.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(snippets), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, script],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"} | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout
