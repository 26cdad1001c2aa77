"""Examples of an epoch where its loss tracker tells less than all. ThroughputLogger's tests: what it is used for."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import EpochExamples, count_examples

X = np.ones((20, 2), "float32")


class Counts(keras.callbacks.Callback):
    """What EpochExamples says of each epoch."""

    def on_train_begin(self, logs=None):
        self.examples = EpochExamples(self.model)
        self.found = []

    def on_epoch_begin(self, epoch, logs=None):
        self.examples.start(self.params.get("steps"))

    def on_train_batch_end(self, batch, logs=None):
        self.done = batch + 1
        if batch >= self.examples.due:
            self.examples.look(batch)

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.examples.examples(self.done))


def found(*callbacks, steps=1, data=None, epochs=1):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=steps)
    data = data or tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
    counts = Counts()
    model.fit(data, verbose=0, shuffle=False, epochs=epochs, callbacks=[*callbacks, counts])
    return counts.found


def test_a_reset_in_the_middle_counts_whole_batches():
    class Resets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.reset_metrics()

    assert found(Resets(), epochs=2) == [24.0, 24.0]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras', at the end of any such dataset
def test_data_that_ends_within_an_execution():
    assert found(steps=4) == [20.0]
    unknown = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8).filter(lambda *_: True)
    # The first execution tells the batches' size only if it is whole.
    assert found(steps=2, data=unknown) == [20.0]


def test_only_this_workers_replicas_are_read():
    class Count:
        """As a metric's variable of two workers with two replicas each: read as one, it waits for the other worker."""

        values = (tf.Variable(8.0), tf.Variable(6.0))

        def numpy(self):
            raise AssertionError("it would hang")

    tracker = SimpleNamespace(count=SimpleNamespace(value=Count(), numpy=Count().numpy))
    strategy = SimpleNamespace(num_replicas_in_sync=4)
    assert count_examples(SimpleNamespace(_loss_tracker=tracker, distribute_strategy=strategy)) == 28.0


def test_a_model_without_a_loss_tracker_counts_none():
    assert count_examples(SimpleNamespace(_loss_tracker=None)) == 0.0
