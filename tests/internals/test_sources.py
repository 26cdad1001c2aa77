import json
import subprocess
import sys

import pytest

from tfopt.errors import UnsupportedError
from tfopt.internals.sources import private

# Everything is imported where Keras and TensorFlow have none of the names that tfopt takes from inside them.
WITHOUT = """
import importlib, json, pkgutil
import keras, numpy as np
from tfopt.internals import sources

def missing(target):
    return sources.Missing(target, ImportError("renamed"))

private, sources.private = sources.private, missing
import tfopt

failed = {}
for module in pkgutil.walk_packages(tfopt.__path__, "tfopt."):
    try:
        importlib.import_module(module.name)
    except Exception as error:
        failed[module.name] = str(error)

data = np.ones((8, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
attempts = {
    "prune": lambda: tfopt.compress.prune(model, (data, data[:, :1])),
    "overlap": lambda: tfopt.fit.overlap(model),
    "logger": lambda: tfopt.callbacks.ThroughputLogger(),
    "pipeline": lambda: sum(1 for _ in tfopt.pipelines.build_pipeline((data, data), batch_size=4)),
    "policy": lambda: tfopt.precision.set_policy("float32"),
}
outcomes = {}
for name, attempt in attempts.items():
    try:
        outcomes[name] = str(attempt())
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print(json.dumps([failed, outcomes]))
"""


def test_what_is_there_comes_back():
    assert private("collections:OrderedDict.fromkeys") is not None
    assert private("json") is json


@pytest.mark.parametrize("target", ["keras.src.nowhere", "keras.src.nowhere:Thing", "keras:Sequential.nothing"])
@pytest.mark.parametrize(
    "use",
    [lambda it: it(1), lambda it: it.attribute, lambda it: isinstance(1, it), lambda it: isinstance(1, (str, it))],
)
def test_what_is_missing_is_refused_when_it_is_used(target, use):
    with pytest.raises(UnsupportedError, match=rf"^Expected {target.replace(':', '.')}, .* Found: none in keras 3\."):
        use(private(target))


def test_everything_can_be_imported_where_all_private_names_are_gone():
    ended = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stderr
    failed, outcomes = json.loads(ended.stdout.splitlines()[-1])
    assert failed == {}
    assert outcomes.pop("policy") == "float32"  # takes none of them
    assert [name for name, outcome in outcomes.items() if not outcome.startswith("UnsupportedError: Expected")] == []
