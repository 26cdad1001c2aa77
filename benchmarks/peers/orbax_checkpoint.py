"""Saves a training in JAX with Orbax's asynchronous checkpointer, for benchmarks/checkpoint_peers.py.

    pip install -r benchmarks/peers/requirements-orbax.txt
    python benchmarks/peers/orbax_checkpoint.py WIDTH OUTPUTS EXAMPLES STEPS

The model is that script's: three dense layers and Adam, in float32. For each line it reads it does one
thing, so that another process can measure in turn with it, and answers in JSON: "train", "restore" or "written".
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax import numpy as jnp

CLOCK = time.perf_counter


def initial_state(width, outputs):
    """Weights, and zeros for both of Adam's slots."""
    random = np.random.default_rng(0)
    shapes = [(width, width), (width, width), (width, outputs)]
    net = [
        {"kernel": jnp.asarray(random.normal(0, 0.02, shape), jnp.float32), "bias": jnp.zeros(shape[1], jnp.float32)}
        for shape in shapes
    ]
    zeros = [jax.tree.map(jnp.zeros_like, net) for _ in range(2)]
    return {"net": net, "momentum": zeros[0], "velocity": zeros[1], "iterations": jnp.zeros((), jnp.int32)}


def loss(net, inputs, targets):
    """The mean squared error."""
    for at, layer in enumerate(net):
        inputs = inputs @ layer["kernel"] + layer["bias"]
        inputs = jax.nn.relu(inputs) if at < len(net) - 1 else inputs
    return jnp.mean((inputs - targets) ** 2)


def step(state, inputs, targets):
    """One update by Adam, with Keras' constants."""
    gradients = jax.grad(loss)(state["net"], inputs, targets)
    iterations = state["iterations"] + 1
    rate = 1e-3 * jnp.sqrt(1 - 0.999**iterations) / (1 - 0.9**iterations)
    momentum = jax.tree.map(lambda m, g: m + 0.1 * (g - m), state["momentum"], gradients)
    velocity = jax.tree.map(lambda v, g: v + 0.001 * (g * g - v), state["velocity"], gradients)
    net = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-7), state["net"], momentum, velocity)
    return {"net": net, "momentum": momentum, "velocity": velocity, "iterations": iterations}


class Training:
    """A training that is saved and restored."""

    def __init__(self, width, outputs, examples, steps):
        self.steps = steps
        self.state = initial_state(width, outputs)
        random = np.random.default_rng(0)
        self.batch = [jnp.asarray(random.random((examples, size), "float32")) for size in (width, outputs)]
        self.compiled = jax.jit(step, donate_argnums=0)
        self.checkpointer = ocp.StandardCheckpointer()
        self.restored_from = tempfile.TemporaryDirectory()
        self.train_for(1)
        self.save(Path(self.restored_from.name))
        self.checkpointer.wait_until_finished()
        if not all(map(np.array_equal, *map(jax.tree.leaves, (self.state, self.restored())))):
            raise RuntimeError("Expected Orbax to restore what it saved. It differs.")

    def train_for(self, steps):
        """Trains, and returns when it ended."""
        for _ in range(steps):
            self.state = jax.block_until_ready(self.compiled(self.state, *self.batch))
        return CLOCK()

    def save(self, folder, number=0):
        """Begins to save."""
        self.checkpointer.save(folder / f"step-{number}", self.state)

    def restored(self):
        """Reads the state back into arrays as they are now."""
        wanted = jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)
        return jax.block_until_ready(self.checkpointer.restore(Path(self.restored_from.name) / "step-0", wanted))

    def train(self):
        """The times of `SaveTimes` in checkpoint_peers.py."""
        with tempfile.TemporaryDirectory() as name:
            marks = [CLOCK(), self.train_for(self.steps)]
            self.save(Path(name), 0)
            marks += [CLOCK(), self.train_for(self.steps)]
            self.checkpointer.wait_until_finished()
            last = CLOCK()
            self.save(Path(name), 1)
            self.checkpointer.wait_until_finished()
            flush(Path(name))
            safe = CLOCK() - last
        began, before, saved, after = marks
        return {
            "without_save_ms": 1000 * (before - began),
            "with_save_ms": 1000 * (after - before),
            "call_ms": 1000 * (saved - before),
            "safe_ms": 1000 * safe,
        }

    def restore(self):
        """Milliseconds of a restore."""
        began = CLOCK()
        self.restored()
        return 1000 * (CLOCK() - began)

    def written(self):
        """MiB of two saves: each writes everything."""
        sizes = []
        with tempfile.TemporaryDirectory() as name:
            for number in range(2):
                self.save(Path(name), number)
                self.checkpointer.wait_until_finished()
                files = (Path(name) / f"step-{number}").rglob("*")
                sizes.append(sum(file.stat().st_size for file in files if file.is_file()) / 2**20)
        return sizes


def flush(folder):
    """Waits until what is in a folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def main():
    """Answers line by line."""
    training = Training(*map(int, sys.argv[1:]))
    versions = {"jax": jax.__version__, "orbax": ocp.__version__}
    print(json.dumps({"versions": versions, "folder": training.restored_from.name}), flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(training, line.strip())()), flush=True)


if __name__ == "__main__":
    main()
