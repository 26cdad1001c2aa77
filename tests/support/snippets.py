"""Runs the Python snippets of README and of the pages of the documentation, and the calls in README's table."""

import ast
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NET = """
import keras, numpy as np
import tfopt
x, y = np.random.rand(256, 8).astype("float32"), np.random.rand(256, 1).astype("float32")
hidden = [keras.layers.Dense(8, "relu") for _ in range(6)]  # enough of them for `recompute`
model = keras.Sequential([keras.Input((8,)), *hidden, keras.layers.Dense(1)])
model.compile("adam", "mse")
"""
_DATASET = _NET + "dataset = tfopt.pipelines.build_pipeline((x, y), batch_size=32)\n"
_PHOTOS = """
import keras, numpy as np, tensorflow as tf
labels = list(range(2)) * 32
files = [f"photos/{label}/{number}.jpg" for number, label in enumerate(labels)]
for label in range(2):
    tf.io.gfile.makedirs(f"photos/{label}")
for file in files:
    tf.io.write_file(file, tf.io.encode_jpeg(np.random.randint(256, size=(20, 24, 3)).astype("uint8")))
def resize(image, label):
    return tf.image.resize(image, (16, 16)), label
def read_and_resize(file, label):
    return resize(tf.io.decode_jpeg(tf.io.read_file(file), channels=3), label)
model = keras.Sequential([keras.Input((16, 16, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
_RAGGED = """
import numpy as np, tensorflow as tf
ragged_dataset = tf.data.Dataset.from_tensors((np.zeros((8, 64)), np.zeros(8)))
"""
YOURS = {
    "README.md": _PHOTOS,
    "callbacks.md": "import pandas\n",
    "measure.md": _DATASET,
    "xla.md": _RAGGED,
}
"""What a page's reader has: names that its snippets use and do not make."""
FIRST = {"tfopt.xla.flags(": "before TensorFlow starts its devices"}
"""Snippets, by what they contain, that are a program of their own, and why."""
NOT_RUN = {
    "import mlflow": "needs MLflow",
    'fetch("s3://bucket': "reads files on S3, Google Cloud and the web",
    "epochs=2, rate=3e-3)": "measures and trains for minutes",
    "compress.PruningSchedule(": "trains for 5,000 steps",
    "distil(model, smaller,": "needs the model of those 5,000 steps",
    "hp.Choice(": "needs KerasTuner",
    "compress.quantize(": "is refused where it is not faster, which depends on the machine",
    "tfopt.distribute.ray": "needs Ray",
    'TrainingCheckpoint("/shared/run-1")': "needs a folder that all workers share",
    "batch_size=256)\nmodel.fit(": "needs files that all workers share",
    'service="grpc://input': "needs a service on another machine",
}
"""Snippets, by what they contain, that cannot run here, and why."""
PAGES = ("README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md")))


def text_of(page):
    return (ROOT / ("" if page == "README.md" else "docs") / page).read_text(encoding="utf-8")


def snippets_of(page):
    return re.findall(r"^```py(?:thon)?\n(.*?)^```", text_of(page), re.S | re.M)


def run_snippets(page, folder, **environment):
    """Runs a page's snippets as one script in `folder`, which has to succeed, and returns what it prints."""
    snippets = [one for one in snippets_of(page) if not any(part in one for part in NOT_RUN)]
    alone = [one for one in snippets if any(part in one for part in FIRST)]
    together = [YOURS.get(page, ""), *(one for one in snippets if one not in alone)]
    scripts = ["\n".join(together), *(f"import tfopt\n{one}" for one in alone)]
    return "".join(run_script(script, folder, **environment) for script in scripts)


def run_script(script, folder, **environment):
    file = folder / "snippets.py"
    file.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{script}", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, file],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2", "HOME": str(folder)} | environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def unresolved(code):
    """The names of tfopt that a piece of Python uses and that do not exist."""
    names = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tfopt":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names |= set(re.findall(r"^tfopt(?:\.\w+)+$", ast.unparse(node)))
    return sorted(name for name in names if not exists(name))


def exists(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def rows_to_call():
    """Each row of README's table as the Python that it stands for: one statement a call, in the order shown."""
    table = text_of("README.md").partition("## What to call\n")[2].partition("\n\nCalls shown")[0]
    return [_statements(re.findall(r"`([^`]+)`", row.split(" | ")[1])) for row in table.strip().splitlines()[2:]]


def _statements(calls):
    statements, module = [], ""
    for call in calls:
        if call.startswith("tfopt-bench"):
            continue
        if call.startswith("callbacks="):
            call = f"model.fit(data, {call}, verbose=0)"
        call = f"{module}{call}" if call.startswith(".") else call
        module = "".join(re.findall(r"tfopt(?:\.\w+)*(?=\.\w+\()", call)[:1]) or module
        statements.append(call)
    return statements


def run_rows(folder):
    """Runs README's table, each row on a new model."""
    make = _NET.replace("import tfopt\n", "")
    setup = (
        "import tfopt\nfrom tfopt.callbacks import *\nfrom tfopt.pipelines import *\n"
        f"{make}data = dataset = build_pipeline((x, y), batch_size=32)\n"
        "batch, steps, source, folder = (x[:32], y[:32]), 2, (x, y), 'records'\na = b = source\n"
    )
    return run_script(setup + "".join(make + "\n".join(row) + "\n" for row in rows_to_call()), folder)
