"""True errors of TensorFlow's allocator, on a CPU whose memory is limited, from `fit` to what the user reads."""

import os
import re
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
import keras, numpy as np, tensorflow as tf, tfopt
layers = [keras.layers.Dense(1024, activation="tanh", name=f"dense_{number}") for number in range(6)]
net = keras.Sequential([keras.Input((1024,)), *layers, keras.layers.Dense(1)])
net.compile("adam", "mse", jit_compile=sys.argv[1] == "xla")
x, y = np.ones((16000, 1024), "float32"), np.ones((16000, 1), "float32")
for size in (64, int(sys.argv[2])):
    before = net.optimizer.iterations.numpy()
    try:
        with tfopt.memory.explained_errors(net):
            net.fit(x[:size], y[:size], batch_size=size, verbose=0)
    except tf.errors.ResourceExhaustedError as error:
        assert isinstance(error, tfopt.errors.OutOfMemoryError)
        print(before, net.optimizer.iterations.numpy(), error, flush=True)
if not net.jit_compile:  # which loses the weights, as the text says
    net.fit(x[:64], y[:64], batch_size=64, verbose=0)
    print("counted in the end:", net.optimizer.iterations.numpy(), flush=True)
else:
    others = [tf.fill(weight.shape, 7.0) for weight in net.weights for _ in range(4)]
    print("lost:", any(np.all(weight.numpy() == 7.0) for weight in net.weights), flush=True)
os._exit(0)  # TensorFlow's allocator may fail as the process ends
"""


def explained(*arguments):
    environ = {
        "TF_CPU_ALLOCATOR_USE_BFC": "1",
        "TF_CPU_BFC_MEM_LIMIT_IN_MB": "256",
        "TF_ENABLE_ONEDNN_OPTS": "0",  # oneDNN ends the process where it gets no memory
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, **environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return " ".join(ran.stdout.split())


@pytest.mark.slow
@pytest.mark.no_gpu
def test_without_xla():
    said = explained("plain", "7000")
    assert re.search(
        r"^1 1 Expected a training step .* Found: layer 'dense_\d' \(operation \S*/dense_\d_1/\w+\) asked for "
        r"27\.3 MiB \(a float32 tensor of shape \[7000, 1024\]\), and not that much was left\. "
        r"A training step on 7000 examples takes \d+\.\d MiB, by the step's graph\.",
        said,
    )
    assert "tfopt.memory.recompute(model)" in said
    assert "tfopt.batch.accumulate(model, 2)" in said
    assert said.endswith("counted in the end: 2")


@pytest.mark.slow
@pytest.mark.no_gpu
def test_under_xla():
    said = explained("xla", "16000")
    assert re.search(
        r"Expected .* Found: the step's XLA program asked for \d+\.\d\d MiB, and not that much was left", said
    )
    assert "by XLA's buffer assignment" in said
    assert "tfopt.memory.recompute(model)" in said
    assert said.endswith("as a step fails, and other tensors overwrite it. lost: True")
