"""Kills a training in the middle of an epoch, starts it again, and shows that it ends as if nothing had happened.

Run it as it is: `python examples/checkpoint.py`. It takes about twenty seconds on two cores.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import keras
import numpy as np

from tfopt import checkpoint
from tfopt.callbacks import TrainingCheckpoint
from tfopt.pipelines import build_pipeline


def train():
    """Trains in the current folder. Started again, it goes on from the last checkpoint there."""
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(3200, 20)).astype("float32")
    layers = keras.layers
    model = keras.Sequential([keras.Input((20,)), layers.Dense(64, "relu"), layers.Dropout(0.2), layers.Dense(1)])
    model.compile("adam", "mse")
    slower = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.005))
    saving = TrainingCheckpoint("checkpoints", every_steps=30)
    dataset = build_pipeline((x, x.sum(1)), batch_size=32, seed=0)  # 100 steps an epoch
    model.fit(dataset, epochs=4, verbose=2, callbacks=[slower, saving])
    np.savez("weights.npz", *model.get_weights())


def start(folder):
    folder.mkdir(exist_ok=True)
    return subprocess.Popen([sys.executable, Path(__file__).resolve(), "train"], cwd=folder)


def compare(whole, killed):
    print("An uninterrupted training:", flush=True)
    start(whole).wait()
    print("\nThe same training, killed in its third epoch:", flush=True)
    training = start(killed)
    while not (saved := checkpoint.available(killed / "checkpoints")) or saved[0].step < 230:
        assert training.poll() is None, "The training ended before it was killed."
        time.sleep(0.02)
    training.kill()  # SIGKILL, which no process can catch
    print(f"exit code {training.wait()}; the last checkpoint: {saved[0]}", flush=True)
    print("\nThe same command again:", flush=True)
    start(killed).wait()
    weights, resumed = (list(np.load(folder / "weights.npz").values()) for folder in (whole, killed))
    assert all(map(np.array_equal, weights, resumed))
    print(f"\nAll {sum(map(np.size, weights)):,} weights of the two trainings are equal, bit for bit.")


if sys.argv[1:] == ["train"]:
    train()
else:
    with tempfile.TemporaryDirectory() as home:
        compare(Path(home, "whole"), Path(home, "killed"))
