"""Replicas that accumulate train as one device does on large batches. As a script, it trains the cases."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from distributed_cases import OwnStep

EXAMPLES = 41  # of the last batch, one replica has no example
random = np.random.default_rng(0)
X, Y, WEIGHTS = random.normal(size=(EXAMPLES, 6)), random.normal(size=(EXAMPLES, 2)), random.random(EXAMPLES)
IDS = random.integers(1, 9, size=(EXAMPLES, 5)) * (np.arange(5) < random.integers(1, 6, size=(EXAMPLES, 1)))
TOKENS = random.normal(size=(EXAMPLES, 5, 2))
optimizers = keras.optimizers


def adamw():
    schedule = optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    return optimizers.AdamW(schedule, weight_decay=0.1, global_clipnorm=0.05)


def sgd(**options):
    return optimizers.SGD(0.1, momentum=0.9, **options)


def scaling():
    return optimizers.LossScaleOptimizer(optimizers.Adam(0.01, clipnorm=0.05))


CASES = {
    "adamw, schedule, clipping": (adamw, {}),
    "float16, overflow": (scaling, {"policy": "mixed_float16"}),
    "sgd, regularizer, averages": (lambda: sgd(use_ema=True), {}),
    "under XLA": (sgd, {"jit_compile": True}),
    "executions": (sgd, {"steps_per_execution": 3}),
    "eagerly": (sgd, {"run_eagerly": True, "data": (X[:40], Y[:40])}),  # plain Keras fails if a replica has none
    "overlapped": (sgd, {}),
    "a custom train_step": (sgd, {"kind": OwnStep}),
    "sample weights": (sgd, {"data": (X, Y, WEIGHTS)}),
    "mean by sample weight": (
        sgd,
        {"data": (X, Y, WEIGHTS), "loss": keras.losses.MeanSquaredError("mean_with_sample_weight", dtype="float64")},
    ),
    "mask": (sgd, {"data": (IDS, TOKENS)}),
    "taken over from Keras": (lambda: sgd(gradient_accumulation_steps=2), {}),
}


def make(optimizer, inputs, kind=keras.Sequential, loss="mse", jit_compile=False, **options):
    keras.utils.set_random_seed(1)
    if inputs is IDS:
        layers = [keras.layers.Embedding(9, 4, mask_zero=True)]
    else:
        layers = [keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2")]
    model = kind([keras.Input(inputs.shape[1:]), *layers, keras.layers.Dense(2)])
    model.compile(optimizer(), loss, metrics=["mae"], weighted_metrics=[], jit_compile=jit_compile, **options)
    return model


def trained(name, strategy, batch, steps):
    """Weights, logs and counters of a case."""
    import tfopt

    optimizer, options = CASES[name]
    options = dict(options)
    policy, data = options.pop("policy", "float64"), options.pop("data", (X, Y))
    keras.config.set_floatx("float64" if policy == "float64" else "float32")
    keras.config.set_dtype_policy(policy)
    if "overflow" in name:
        data = (X, Y + np.where(np.arange(EXAMPLES) == 22, 1e4, 0)[:, None])  # in the second round
    with strategy.scope():
        model = make(optimizer, data[0], **options)
    tfopt.batch.accumulate(model, steps)
    if name == "overlapped":
        tfopt.fit.overlap(model)
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(batch)
    logs = model.fit(dataset, epochs=2, shuffle=False, verbose=0).history
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "logs": logs,
        "iterations": int(model.optimizer.iterations.numpy()),
        "scale": None if scale is None else float(scale.numpy()),
    }


def main(target):
    """Trains all cases on one device and on two replicas, and writes what came out."""
    import tfopt

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    replicas, one = tfopt.distribute.strategy("mirrored"), tf.distribute.get_strategy()
    found = {name: [trained(name, one, 16, 1), trained(name, replicas, 4, 4)] for name in CASES}
    Path(target).write_text(json.dumps(found))


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    target = tmp_path_factory.mktemp("trained") / "found.json"
    folders = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, __file__, target], env=environ, check=True, timeout=500)
    return json.loads(target.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_replicas_train_as_one_device_on_large_batches(found, name):
    large, replicas = found[name]
    tolerance = 5e-3 if "float16" in name else 1e-9
    for one, other in zip(replicas["weights"], large["weights"], strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    assert (replicas["iterations"], replicas["scale"]) == (large["iterations"], large["scale"])
    assert large["iterations"] == (4 if "overflow" in name else 6)
    if name not in ("mask", "mean by sample weight", "float16, overflow"):
        for key, values in large["logs"].items():
            np.testing.assert_allclose(replicas["logs"][key], values, rtol=1e-9)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1])
