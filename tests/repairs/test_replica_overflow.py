import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfopt import repairs

# One strategy for all: TensorFlow numbers the collective operations of each strategy from the start, and those of
# two in one process get into each other's way.
SCRIPT = """
import json
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import keras
import numpy as np
from tfopt import repairs

strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
EXAMPLES = 4  # a replica

def replicas(variable):
    return [part.numpy().tolist() for part in getattr(variable.value, "values", (variable.value,))]

def trained(overflow_in, steps=1):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *(layers.Dense(n, dtype="mixed_float16") for n in (3, 1))])
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    random = np.random.default_rng(0)
    x, y = random.random((2 * EXAMPLES, 4), "float32"), random.random((2 * EXAMPLES, 1), "float32") / 100
    if overflow_in is not None:
        y[overflow_in * EXAMPLES:(overflow_in + 1) * EXAMPLES] = 1e4  # times the loss scale: beyond float16
    before = [replicas(weight) for weight in model.weights]
    model.fit(tf.data.Dataset.from_tensors((x, y)).repeat(steps), verbose=0, shuffle=False)
    after = [replicas(weight) for weight in model.weights]
    return {
        "unchanged": after == before,
        "weights": after,
        "finite": all(bool(np.isfinite(weight.numpy()).all()) for weight in model.weights),
        "scales": replicas(model.optimizer.dynamic_scale),
        "iterations": int(model.optimizer.iterations.numpy()),
    }

def verdicts(planted, merges):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    extended = type(strategy.extended)
    kept = extended._use_merge_call
    extended._use_merge_call = lambda self: merges
    try:
        @tf.function
        def run():
            def check():
                replica = tf.distribute.get_replica_context().replica_id_in_sync_group
                return optimizer.check_finite([tf.constant([1.0, 2.0]), None, planted[replica]])
            return strategy.run(check)
        return [bool(v.numpy()) for v in strategy.experimental_local_results(run())]
    finally:
        extended._use_merge_call = kept

found = {}
for name, use in ("stock", repairs.remove), ("repaired", repairs.install):
    use("replica_overflow")
    found[name] = {"healthy": trained(None, steps=5), "0": trained(0), "1": trained(1)}
    for merges in (True, False):
        key = "merge" if merges else "no merge"
        bad = {"0": [np.inf, 1.0], "1": [1.0, np.nan], "none": [1.0, 2.0]}
        found[name][key] = {
            where: verdicts(tf.constant(value, tf.float32), merges) for where, value in bad.items()
        }

def updated(strategy, examples, dtype="mixed_float16"):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, "relu", dtype=dtype)])
        model.compile(keras.optimizers.SGD(1e-4), "mse", jit_compile=False)
        model.layers[0].set_weights([np.full((4, 1), 0.1), np.zeros(1)])
    data = tf.data.Dataset.from_tensors((np.ones((examples, 4), "float32"), np.full((examples, 1), 1.6, "float32")))
    model.fit(data, epochs=3, verbose=0, shuffle=False)
    return int(model.optimizer.iterations.numpy()), float(model.get_weights()[1][0])

repairs.install(*repairs.REPLICAS, *repairs.FLOAT16)
alone = tf.distribute.get_strategy()
for examples in (8, 9):
    found[f"summed {examples}"] = {
        "one": updated(alone, examples),
        "replicas": updated(strategy, examples),
        "float32": updated(alone, examples, "float32"),
    }
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    """What two replicas did, stock and repaired: logical devices are made before TensorFlow starts."""
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_stock_keras_looks_at_the_first_replica_only(found):
    stock = found["stock"]
    assert (stock["0"]["unchanged"], stock["0"]["scales"]) == (True, [2.0**14] * 2)
    assert (stock["1"]["finite"], stock["1"]["scales"], stock["1"]["iterations"]) == (False, [2.0**15] * 2, 1)


@pytest.mark.slow
@pytest.mark.parametrize("replica", ["0", "1"])
def test_an_overflow_in_any_replica_is_seen_by_all(found, replica):
    repaired = found["repaired"][replica]
    assert repaired["unchanged"]
    assert repaired["finite"]
    assert repaired["scales"] == [2.0**14] * 2
    assert repaired["iterations"] == 0


@pytest.mark.slow
def test_a_healthy_step_is_stocks_bit_for_bit(found):
    assert found["repaired"]["healthy"] == found["stock"]["healthy"]
    assert not found["stock"]["healthy"]["unchanged"]
    assert found["stock"]["healthy"]["iterations"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("path", ["merge", "no merge"])
def test_the_verdict_is_one_in_both_of_tensorflows_paths(found, path):
    """Without merge calls TensorFlow reduces within the replicas, as it does for XLA on GPUs."""
    assert found["stock"][path] == {"0": [False, True], "1": [True, False], "none": [True, True]}
    assert found["repaired"][path] == {"0": [False, False], "1": [False, False], "none": [True, True]}


@pytest.mark.slow
def test_without_replicas_nothing_changes():
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    repairs.install("replica_overflow")
    graph = tf.function(lambda g: optimizer.check_finite([g, None])).get_concrete_function(tf.constant([1.0])).graph
    assert not [op.type for op in graph.get_operations() if "Collective" in op.type or op.type == "Cast"]
    assert bool(optimizer.check_finite([tf.constant([1.0, 2.0])]))
    assert not bool(optimizer.check_finite([tf.constant([1.0, float("inf")])]))


@pytest.mark.slow
@pytest.mark.parametrize("examples", [8, 9])
def test_replicas_rightly_take_a_step_whose_gradient_overflows_only_in_one_devices_sum(found, examples):
    """They sum their parts in 32 bits. To skip it like one device, they would have to drop a right gradient."""
    (one, _), (replicas, bias), (_, right) = found[f"summed {examples}"].values()
    assert (one, replicas) == (2, 3)
    assert bias == pytest.approx(right, rel=1e-3)
