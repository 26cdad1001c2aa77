"""The snippets of docs/records.md run as they stand, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "records.md").read_text(encoding="utf-8"), re.S)


def test_the_snippets_run(tmp_path, picture):
    for number in range(6):
        picture(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
    script = tmp_path / "snippets.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(SNIPPETS))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    for shown in ("6 ('a', 'b')", "4 files of records: as the index says", "keeps 999 records", "999 "):
        assert shown in result.stdout
