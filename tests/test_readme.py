"""The README's figures are those of a recorded run, and its example runs as it stands."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfopt
from tfopt import callbacks, pipelines
from tfopt.measure import StepTimes, compare

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_read_in_three_minutes():
    assert len(README.splitlines()) <= 90


def test_the_figures_before_and_after_are_those_of_the_recorded_run():
    document = json.loads((ROOT / "benchmarks" / "results" / "cpu.json").read_text(encoding="utf-8"))
    assert document["status"] == "complete"
    (case,) = (case for case in document["cases"] if (case["suite"], case["workload"]) == ("stack", "photos"))
    variants = {variant["name"]: variant for variant in case["variants"]}
    before, after = variants["Keras' defaults"], next(v for v in case["variants"] if v["recommended"])
    assert before["check"]["passed"]
    assert after["check"]["passed"]
    assert after["name"] == "+ overlap"
    times = [StepTimes.from_dict(variant["step_time"]) for variant in (before, after)]
    comparison = compare(*times)
    low, high = comparison.interval
    prose = " ".join(README.split())
    assert f"took {times[0].median_ms:.1f} ms a step with Keras' defaults and {times[1].median_ms:.1f} ms" in prose
    assert f"{comparison.ratio:.2f}× as fast (95 % interval {low:.2f}–{high:.2f})" in prose


def test_recorded_runs_name_no_place():
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert not re.search(r'"[^"]*(/home|/root|/Users|/tmp|/var)[^"]*"', path.read_text()), path


@pytest.mark.slow
def test_the_examples_run(tmp_path):
    before_and_after, training = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len([line for line in before_and_after.splitlines() if line]) <= 8
    setup = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import keras, numpy as np, tensorflow as tf
labels = list(range(2)) * 32
files = [f"photos/{{label}}/{{number}}.jpg" for number, label in enumerate(labels)]
for label in range(2):
    tf.io.gfile.makedirs(f"photos/{{label}}")
for file in files:
    tf.io.write_file(file, tf.io.encode_jpeg(np.random.randint(256, size=(20, 24, 3)).astype("uint8")))
def resize(image, label):
    return tf.image.resize(image, (16, 16)), label
def read_and_resize(file, label):
    return resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), label)
model = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([setup, before_and_after, training])],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    for name in ("utilization", "throughput"):
        assert (tmp_path / "logs" / f"{name}.csv").read_text().count("\n") > 1


def test_links_lead_to_files():
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link.partition("#")[0]).exists(), link


def test_each_call_in_the_table_exists():
    calls = re.findall(r"\| `(?:callbacks=\[)?(?:tfopt\.)?([\w.]+)\(", README)
    assert len(calls) >= 12
    for call in calls:
        *path, name = call.split(".")
        homes = [importlib.import_module(".".join(["tfopt", *path]))] if path else [tfopt, pipelines, callbacks]
        assert any(callable(getattr(home, name, None)) for home in homes), call


def test_the_two_commands_are_where_ci_finds_them():
    found = re.findall(r"^pip install '\.\[(bench|test)\]' && (.*)$", README, re.M)
    assert found == [("bench", "tfopt-bench"), ("test", "python -m pytest -n 2")]
