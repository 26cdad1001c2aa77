"""The second run computes from the same weights as the first, whatever else the machine does meanwhile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import recomputed_nets as nets
from graph_order import unordered
from quick import first_quick

import tfopt
from tfopt.memory import recompute

NETS = {"small": nets.small, "sequential": nets.sequential, "functional": nets.functional, "recurrent": nets.recurrent}
OTHERS = {
    "accumulate": lambda model: tfopt.batch.accumulate(model, 2),
    "fused batch norm": tfopt.kernels.fuse_batch_norm,
    "overlapped": tfopt.fit.overlap,
    "both": lambda model: (tfopt.kernels.fuse_batch_norm(model), recompute(model)),
}


def batch(name):
    return (nets.VALUES, nets.IDS[:, 0]) if name not in NETS or name == "small" else (nets.IDS, nets.IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(list(NETS), 2))
def test_a_recomputed_step_reads_each_weight_in_an_order_to_its_update(name):
    model = nets.made(NETS[name])
    assert recompute(model)
    assert unordered(model, batch(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_changed_steps_read_each_variable_in_an_order_to_its_update(name):
    model = nets.made(nets.small)
    OTHERS[name](model)
    assert unordered(model, batch(name)) == []


MANY_TIMES = """
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_inter_op_parallelism_threads(8)  # as on a larger machine
keras.config.set_dtype_policy("float64")
keras.config.set_floatx("float64")
import recomputed_nets as nets
from tfopt.memory import recompute

data = tf.data.Dataset.from_tensors((nets.VALUES, nets.IDS[:, 0])).repeat()
results = []
for recomputed in (False, True):
    model = nets.made(lambda: nets.small(*[None] * 4), optimizer=keras.optimizers.Adam(0.01))
    if recomputed:
        assert recompute(model)
    model.optimizer.build(model.trainable_variables)
    variables = [*model.variables, *model.optimizer.variables]
    start = [variable.numpy() for variable in variables]
    model.make_train_function()
    for _ in range(300):
        for variable, value in zip(variables, start):
            variable.assign(value)
        iterator = iter(data)
        for _ in range(24):
            model.train_function(iterator)
        results.append([variable.numpy() for variable in variables])
assert all(np.array_equal(*pair) for result in results for pair in zip(result, results[0]))
"""


@pytest.mark.campaign
def test_trains_the_same_many_times_on_a_busy_machine():
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "support")}
        subprocess.run([sys.executable, "-c", MANY_TIMES], env=environ, check=True)
    finally:
        for one in busy:
            one.kill()
            one.wait()
