"""Searches for an accurate net whose training step stays within a budget: KerasTuner, with measured costs.

Run it as it is: `python examples/search.py`. It needs `pip install keras-tuner scikit-learn`, and takes a minute on two
cores.
"""

import tempfile

import keras
import keras_tuner
from sklearn.datasets import load_digits

import tfopt

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
train, validation = (images[:1400], labels[:1400]), (images[1400:], labels[1400:])
batch = images[:64], labels[:64]


def net(width, depth, separable):
    """A convolutional net for the digits."""
    layers = keras.layers
    convolution = layers.SeparableConv2D if separable else layers.Conv2D
    stages = [convolution(width, 3, padding="same", activation="relu") for _ in range(depth)]
    net = keras.Sequential([keras.Input((8, 8, 1)), *stages, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile("adam", loss, metrics=["accuracy"])
    return net


largest = net(width=64, depth=3, separable=False)
print(tfopt.compress.cost(largest, batch))
budget_ms = tfopt.measure.step_time(largest, batch).median_ms / 2


def within_budget(hp):
    """Builds a net; a trial whose step takes too long ends before it trains."""
    found = net(hp.Choice("width", [16, 32, 64]), hp.Int("depth", 1, 3), hp.Boolean("separable"))
    step_ms = tfopt.measure.step_time(found, batch).median_ms
    if step_ms > budget_ms:
        raise keras_tuner.errors.FailedTrialError(f"{step_ms:.1f} ms a step, at most {budget_ms:.1f} wanted")
    return found


with tempfile.TemporaryDirectory() as folder:
    tuner = keras_tuner.RandomSearch(
        within_budget,
        "val_accuracy",
        max_trials=6,
        max_consecutive_failed_trials=7,  # or three nets over the budget in a row would end the search
        seed=0,
        directory=folder,
    )
    tuner.search(*train, validation_data=validation, epochs=4, verbose=0)
    for trial in sorted(tuner.oracle.trials.values(), key=lambda trial: -(trial.score or 0)):
        accuracy = f"accuracy {trial.score:.3f}" if trial.score else trial.message.strip().rpartition(": ")[2]
        print(f"{trial.hyperparameters.values}: {accuracy}")
