"""The snippets of docs/pipelines.md run as they stand, one after the other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

ROOT = Path(__file__).parents[2]
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8"), re.S)


def test_the_snippets_run(tmp_path, picture):
    for number in range(12):
        picture(tmp_path / "photos" / "train" / "abc"[number % 3] / f"{number}.png")
        picture(tmp_path / "photos" / "val" / "ac"[number % 2] / f"{number}.png")
    feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    record = tf.train.Example(features=tf.train.Features(feature={"label": feature})).SerializeToString()
    for name, compression in (("train-0.tfrecord", ""), ("train-1.tfrecord", ""), ("packed.gz", "GZIP")):
        with tf.io.TFRecordWriter(str(tmp_path / name), compression) as writer:
            for _ in range(6):
                writer.write(record)
    script = tmp_path / "snippets.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + "\n".join(SNIPPETS))
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"}
    result = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, env=environment, check=False
    )
    assert result.returncode == 0, result.stderr
    for shown in ("Training pipeline over arrays", "('a', 'b', 'c')", "\n12\n", "reads a variable", "NumPy"):
        assert shown in result.stdout
