"""On two replicas, too, a training that is interrupted ends as one that was not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from resumed_fits import dense_net

from tfopt import checkpoint
from tfopt.checkpoint.folder.reading import read

SUPPORT = Path(__file__).parents[1] / "support"


_SLOW = ("arrays", "pipeline", "validation of the same dataset")
_CAMPAIGN = (
    *("dataset", "plateau", "float16", "pipeline cached", "accumulation", "own step"),
    # Before each validation Keras reads a batch to build the model.
    *("validation shuffled", "validation of arrays by steps", "validation of the same dataset by steps"),
    *("validation of the same pipeline", "validation of the same pipeline by steps"),
)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow) for case in _SLOW]
    + [pytest.param(case, marks=pytest.mark.campaign) for case in _CAMPAIGN],
)
def test_ends_as_one_that_was_not_interrupted(tmp_path, case):
    moments = "within an epoch", "in the validation", *(["in a later validation"] if "validation" in case else [])
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [SUPPORT.parents[1], SUPPORT]))}
    command = [sys.executable, SUPPORT / "resumed_replicas.py", tmp_path, case, *moments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rpartition("FOUND")[2])
    assert found == {"replicas": 2, "differences": dict.fromkeys(moments)}
    if case == "arrays":
        expect_restored_on_one_device(tmp_path / "0")


def expect_restored_on_one_device(folder):
    """Of averages that each replica has of its own, a model on one device gets those of the first."""
    keras.backend.clear_session()
    model = dense_net()
    checkpoint.restore(model, folder)
    arrays = read(folder).arrays
    averages = [name for name in arrays if "moving" in name]
    assert [arrays[name].shape for name in averages] == [(2, 8), (2, 8)]
    norm = model.layers[1]
    restored = [norm.moving_mean.numpy(), norm.moving_variance.numpy()]
    assert all(np.array_equal(value, arrays[name][0]) for value, name in zip(restored, averages, strict=True))
