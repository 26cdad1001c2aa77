"""Trainings run twice, by stock `fit` and overlapped, and compared."""

import keras
import numpy as np
import tensorflow as tf
from models import summed_in_one_order

from tfopt import fit

_random = np.random.default_rng(0)
X = _random.normal(size=(40, 8)).astype("float32")
Y = _random.integers(4, size=40)
BATCH = 16  # the third and last batch is of 8


def dense_net(**options):
    """Dense layers with dropout, compiled with momentum and a metric."""
    layers = keras.layers
    body = [layers.Dense(6, activation="relu"), layers.Dropout(0.3), layers.Dense(4)]
    return compiled(keras.Sequential([keras.Input((8,)), *body]), **options)


def compiled(model, **options):
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": optimizer, "loss": loss, "metrics": ["accuracy"], "jit_compile": False} | options)
    return model


def dataset(x=X, y=Y, batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)


class Steps(keras.metrics.Metric):
    """Its result is a variable, which the next step changes."""

    def __init__(self):
        super().__init__(name="steps")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, *_, **__):
        self.count.assign_add(1.0)

    def result(self):
        return self.count


class Trace(keras.callbacks.Callback):
    """Notes every call, and the logs as they were handed over, which nobody reads before the training is over."""

    acts_every = 0

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch, logs))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, logs))

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch, dict(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.calls.append(("test", batch, logs))

    def on_train_end(self, logs=None):
        self.calls.append(("over", dict(logs)))


class Pair:
    """Two models alike, one overlapped, each to be trained from one state, again and again.

    Args:
        make: Function that returns a compiled model.
        steps_per_launch: As `overlap` takes it.
        beside: What is done to the other one: nothing, or `fit.overlap` where stock `fit` itself is wrong.
    """

    def __init__(self, make=dense_net, steps_per_launch=1, beside=lambda model: model):
        self.models = []
        for overlapped in (False, True):
            keras.utils.set_random_seed(7)
            model = make()
            if overlapped:
                fit.overlap(model, log_every=2, steps_in_flight=2, steps_per_launch=steps_per_launch)
            else:
                beside(model)
            self.models.append(model)
        self.stock, self.overlapped = self.models
        self._starts = [[(part, part.numpy()) for part in parts(model)] for model in self.models]

    def train(self, train):
        """Has both trained by a function of a model. What they are then, and what it returns, has to be the same."""
        results = []
        for model, start in zip(self.models, self._starts, strict=True):
            for part, value in start:
                part.assign(value)
            keras.utils.set_random_seed(7)
            with summed_in_one_order():
                results.append(train(model))
            results.append([part.numpy().tobytes() for part in parts(model)])
        assert results[2] == results[0]
        # By place: Keras numbers the names.
        unlike = zip(parts(self.stock), results[1], results[3], strict=True)
        assert [part.path for part, stock, overlapped in unlike if stock != overlapped] == []
        return results[0]


def parts(model):
    """Every variable that there is by now."""
    optimizer = model.optimizer
    if model.built and optimizer is not None and not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    return [*model.variables, *model.metrics_variables, *(optimizer.variables if optimizer else ())]
