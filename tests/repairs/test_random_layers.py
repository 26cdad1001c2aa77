"""What random layers draw on several replicas: on two logical devices and in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # logical devices are made before TensorFlow starts: processes of their own
# Prints, of each case, what each replica in this process draws in three steps, and the generators' states after them.
SCRIPT = """
import json
import sys
import keras
import tensorflow as tf
from tfopt import distribute, repairs

devices, folder = int(sys.argv[1]), sys.argv[2]
if devices:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
strategy = distribute.strategy("auto")
if sys.argv[3:] == ["stock"]:
    repairs.remove("random_layers")

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5, seed=1),
    "noise": lambda: keras.layers.GaussianNoise(1.0, seed=1),
    "spatial": lambda: keras.layers.SpatialDropout1D(0.5, seed=1),
    "float16": lambda: keras.layers.Dropout(0.5, seed=1, dtype="mixed_float16"),
}
ones = tf.ones((1, 4, 500))

def drawn(make, jit):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4, 500)), make()])

    @tf.function(jit_compile=jit)
    def draw():
        return model(ones, training=True)

    replicas = tf.function(lambda: strategy.run(draw))
    local = strategy.experimental_local_results
    steps = [[one.numpy().ravel().tolist() for one in local(replicas())] for _ in range(3)]
    states = [
        part.numpy().tolist()
        for weight in model.non_trainable_variables
        for part in local(weight.value)
    ]
    return {"steps": steps, "states": states}

kinds = (False, True) if devices < 2 else (False,)  # XLA takes logical CPU devices for one
found = {f"{name}, {'XLA' if jit else 'graph'}": drawn(make, jit) for name, make in LAYERS.items() for jit in kinds}
with open(f"{folder}/{distribute.resolve().index}.json", "w") as file:
    json.dump(found, file)
"""


def drawn(folder, devices, *arguments):
    """What each process found; in a cluster of two if there are no logical devices."""
    script = folder / "draw.py"
    script.write_text(SCRIPT)
    command = [] if devices else ["-m", "tfopt.distribute.launch", "-n", "2"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(ROOT)}
    environ.pop("TF_CONFIG", None)
    run = subprocess.run(
        [sys.executable, *command, script, str(devices), folder, *arguments],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[0-9].json"))]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("one"), 1)[0]


def test_stock_keras_repeats_a_mask_in_each_replica(tmp_path, one_device):
    for case, found in drawn(tmp_path, 2, "stock")[0].items():
        for first, second in found["steps"]:
            assert first == second, case
        assert [first for first, _ in found["steps"]] == [first for (first,) in one_device[case]["steps"]]


@pytest.mark.parametrize("devices", [3, 0], ids=["three devices", "two processes"])
def test_replicas_draw_apart_and_the_first_as_one_device(tmp_path, one_device, devices):
    processes = drawn(tmp_path, devices)
    assert len(processes[0]) == (4 if devices else 8)
    for case in processes[0]:
        expected = one_device[case]
        for step, (alone,) in enumerate(expected["steps"]):
            draws = [replica for found in processes for replica in found[case]["steps"][step]]
            assert len(draws) == (devices or 2)
            assert draws[0] == alone
            for at, one in enumerate(draws):
                for other in draws[:at]:
                    # 2,000 numbers are dropped alike by chance in half of the cases; of noise, none are alike.
                    assert np.mean(np.equal(one, other)) < 0.56, case
        states = [state for found in processes for state in found[case]["states"]]
        assert states == expected["states"] * (devices or 2)  # one file for all replicas, and for one device
