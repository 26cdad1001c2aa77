"""What `fit` is given, and that it comes back as it was."""

import keras
import numpy as np
from tensorflow.python.eager import context

from tfopt.diagnosis.training import Training


def test_a_script_need_not_set_a_seed(monkeypatch):
    monkeypatch.delattr(context.context(), "_rng", raising=False)
    monkeypatch.setattr(context.context(), "_seed", None)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    training = Training.of(model, {"x": np.zeros((4, 2), "float32"), "y": np.zeros((4, 1), "float32")})
    with training.untouched():
        model.fit(training.resident, steps_per_epoch=1, verbose=0, shuffle=False)
