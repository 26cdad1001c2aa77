from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import EpochExamples, count_examples

X = np.ones((20, 2), "float32")


class Counts(keras.callbacks.Callback):
    """What EpochExamples says of each epoch, and when it had the tracker read."""

    def on_train_begin(self, logs=None):
        self.examples = EpochExamples(self.model)
        self.found, self.looks = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.examples.start(self.params.get("steps"))

    def on_train_batch_end(self, batch, logs=None):
        self.done = batch + 1
        if batch >= self.examples.due:
            self.looks.append(batch)
            self.examples.look(batch)

    def on_test_begin(self, logs=None):
        self.examples.look_before_validation(self.done)

    def on_epoch_end(self, epoch, logs=None):
        self.found.append(self.examples.examples(self.done))


@pytest.fixture(scope="module")
def net():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def fit(net, *callbacks, **options):
    counts = Counts()
    net.fit(X, X[:, :1], verbose=0, epochs=2, callbacks=[*callbacks, counts], **options)
    return counts


def fit_to(net, dataset, **options):
    counts = Counts()
    net.fit(dataset, shuffle=False, verbose=0, callbacks=[counts], **options)
    return counts


def test_a_smaller_last_batch_counts_as_it_is(net):
    counts = fit(net, batch_size=8)
    assert counts.found == [20.0, 20.0]
    assert counts.looks == [0, 2, 2]  # the first step, and each epoch's last one


def test_validation_does_no_harm(net):
    assert fit(net, batch_size=8, validation_data=(X[:3], X[:3, :1])).found == [20.0, 20.0]


def test_an_evaluation_by_another_callback_does_no_harm(net):
    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.evaluate(X[:5], X[:5, :1], verbose=0)

    assert fit(net, Evaluates(), batch_size=8).found == [20.0, 20.0]


def test_a_reset_in_the_middle_counts_whole_batches(net):
    class Resets(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.reset_metrics()

    assert fit(net, Resets(), batch_size=8).found == [24.0, 24.0]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras', at the end of any such dataset
def test_an_unknown_number_of_steps(net):
    unknown = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8).filter(lambda *_: True)
    counts = Counts()
    net.fit(unknown, shuffle=False, verbose=0, callbacks=[counts])
    assert counts.found == [20.0]
    assert counts.looks == [0]
    assert fit_to(net, unknown, validation_data=unknown.take(1)).found == [20.0]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("steps", [2, 4])
def test_data_that_ends_within_an_execution(steps):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False, steps_per_execution=steps)
    known = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).batch(8)
    assert fit_to(model, known).found == [20.0]
    if steps == 2:  # the first execution tells the batches' size only if it is whole
        assert fit_to(model, known.filter(lambda *_: True)).found == [20.0]


def test_a_model_that_counts_none():
    examples = EpochExamples(object())
    examples.start(1)
    examples.look(0)
    assert examples.examples(1) is None


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
