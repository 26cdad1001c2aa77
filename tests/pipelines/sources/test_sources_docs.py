"""The snippets of docs/sources.md run as they stand, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

ROOT = Path(__file__).parents[3]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sources.md").read_text(encoding="utf-8"), re.S)


def test_the_snippets_run(tmp_path, picture, prepare_tfds):
    for number in range(4):
        picture(tmp_path / "photos" / "train" / "ab"[number % 2] / f"{number}.png")
        picture(tmp_path / "photos" / "val" / "b" / f"{number}.png")
    with tf.io.TFRecordWriter(str(tmp_path / "train-0.tfrecord")) as writer:
        for _ in range(6):
            writer.write(b"record")
    prepare_tfds(tmp_path / "prepared", "mnist")
    script = tmp_path / "snippets.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(SNIPPETS))
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "TFDS_DATA_DIR": str(tmp_path / "prepared")}
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environ, check=False
    )
    assert result.returncode == 0, result.stderr
    for shown in ("1000\n", "tfds mnist/1.0.0 [train] ('even', 'odd')\n", "prepared data set 'cifar10'"):
        assert shown in result.stdout
