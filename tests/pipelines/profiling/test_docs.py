"""The snippet of docs/profiling.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_snippet_runs(tmp_path):
    text = (ROOT / "docs" / "profiling.md").read_text(encoding="utf-8")
    script = tmp_path / "snippets.py"
    snippets = re.findall(r"```python\n(.*?)```", text, re.S)
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(snippets))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "transform"
    for column in ("ms/example", "at once", "busy", "without it"):
        assert f"`{column}`" in text
        assert column in result.stdout
