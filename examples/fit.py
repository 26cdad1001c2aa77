"""Trains a small net with stock and with overlapped `fit`, and in launches of 16 steps: the same losses, in less time.

Run it as it is: `python examples/fit.py`. It needs scikit-learn: `pip install '.[bench]'`. The smaller the step, the
larger the gain; a GPU also gains by copying each batch ahead.
"""

import keras
from sklearn.datasets import load_digits

import tfopt
from tfopt.callbacks import ThroughputLogger
from tfopt.pipelines import build_pipeline

digits = load_digits()
x, y = (digits.data / 16).astype("float32"), digits.target.astype("int32")


def train(steps_per_launch=None):
    keras.utils.set_random_seed(0)
    dataset = build_pipeline((x, y), batch_size=16, seed=0, remainder="drop")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    if steps_per_launch:
        tfopt.fit.overlap(model, steps_per_launch=steps_per_launch)
    return model.fit(dataset, epochs=5, verbose=0, callbacks=[ThroughputLogger()]).history


histories = {"stock": train(), "overlapped": train(1), "launches": train(16)}
for name, history in histories.items():
    print(f"{name:11} {history['step_time_ms'][-1]:.2f} ms a step, loss {history['loss'][-1]:.6f}")
    assert history["loss"] == histories["stock"]["loss"]
