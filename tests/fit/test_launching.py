"""A step that is launched gives what Keras' own function gives, whatever it is made of and whoever calls it."""

import copy

import keras
import pytest
import tensorflow as tf
from fitting import Pair, Steps, Trace, X, Y, compiled, dataset, dense_net

from tfopt import fit
from tfopt.fit import launching
from tfopt.fit.launching import next_tensors

ONCE = {"verbose": 0, "shuffle": False}


def counting(**options):
    """A metric whose result is a variable, which an eager step returns as it is."""
    layers = [keras.Input((8,)), keras.layers.Dense(4)]
    return compiled(keras.Sequential(layers), metrics=[Steps()], **options)


def static():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(8, drop_remainder=True)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras', for a variable among logs
@pytest.mark.parametrize("eager", [True, False])
def test_eager_is_what_the_step_was_when_it_was_made(eager):
    def train(model):
        histories = [model.fit(dataset(), **ONCE).history]
        model.run_eagerly = not eager  # Keras looks at it when it makes the step
        try:
            for data in (dataset(), static()):
                traces.append(Trace())
                histories.append(model.fit(data, callbacks=[traces[-1]], **ONCE).history)
        finally:
            model.run_eagerly = eager
        return histories, [trace.calls for trace in traces[-2:]]

    traces = []
    Pair(lambda: counting(run_eagerly=eager)).train(train)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_all_functions_run_eagerly():
    def train(model):
        trace = Trace()
        tf.config.run_functions_eagerly(True)
        try:
            model.fit(dataset(), callbacks=[trace], **ONCE)
        finally:
            tf.config.run_functions_eagerly(False)
        model.fit(dataset(), callbacks=[trace], **ONCE)
        return trace.calls

    assert [call[2]["steps"] for call in Pair(counting).train(train) if call[0] == "end"] == [1, 2, 3] * 2


class OddLogs(keras.Sequential):
    """Its logs are not tensors alone."""

    def train_step(self, data):
        loss = super().train_step(data)["loss"]
        return {"list": [loss, 2 * loss], "text": "x", "number": 1.5, "rows": tf.sparse.from_dense(data[0][:, :2])}


@pytest.mark.parametrize("eager", [True, False])
def test_odd_logs(eager):
    def train(model):
        trace = Trace()
        model.fit(dataset(), callbacks=[trace], **ONCE)
        return repr(trace.calls)

    def make():
        return compiled(OddLogs([keras.Input((8,)), keras.layers.Dense(4)]), metrics=None, run_eagerly=eager)

    assert "'list': array([" in Pair(make).train(train)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_loop_of_ones_own(steps):
    def train(model):
        model.make_train_function()
        iterator, logs = iter(dataset(batch=8)), []
        try:
            while True:
                logs.append(model.train_function(iterator))
        except (StopIteration, tf.errors.OutOfRangeError) as error:
            end = type(error)
        model.optimizer.iterations.assign(0)  # stock counts the step that had no batch
        kept = keras.tree.map_structure(float, copy.deepcopy(logs))
        return kept, [type(each) for each in logs], end

    def make():
        layers = [keras.Input((8,)), keras.layers.Dense(4)]
        return compiled(keras.Sequential(layers), steps_per_execution=steps)

    kept, kinds, _ = Pair(make).train(train)
    assert len(kept) == 5 // steps + 5 % steps
    assert set(kinds) == {dict}


def test_the_shortcut_is_left_when_execution_turns_asynchronous(monkeypatch):
    model = fit.overlap(dense_net())
    model.fit(dataset(), **ONCE)
    assert model.train_function._take is next_tensors
    monkeypatch.setattr(tf.config.experimental, "get_synchronous_execution", lambda: False)
    model.fit(dataset(), **ONCE)
    assert model.train_function._take is next


def taken(data):
    return [[part.numpy().tolist() for part in batch] for batch in data]


@pytest.mark.parametrize("known", [True, False])
def test_it_trains_the_same_with_the_shortcut_and_without(monkeypatch, known):
    asked = []
    monkeypatch.setattr(launching, "is_known", lambda: asked.append(known) or known)
    weighted = tf.data.Dataset.from_tensor_slices((X, Y, abs(X[:, 0]))).batch(16)
    Pair().train(lambda model: model.fit(weighted, epochs=2, verbose=0, shuffle=False).history)
    assert asked


def test_the_shortcut_takes_what_next_does():
    iterator = iter(dataset())
    batches = [next_tensors(iterator, None) for _ in range(3)]
    assert taken(batches) == taken(dataset())
    assert next_tensors(iterator, None) is None


@pytest.mark.parametrize(
    ("data", "has"),
    [
        (dataset(), True),
        (dataset().map(lambda x, y: (x,)), True),
        (dataset().map(lambda x, y: x), False),
        (dataset().map(lambda x, y: {"b": x, "a": x}), False),  # in which order?
        (dataset().map(lambda x, y: ((x, x), y)), False),
        (dataset().map(lambda x, y: (tf.RaggedTensor.from_tensor(x), y)), False),
    ],
)
def test_the_shortcut_is_for_tuples_of_tensors(data, has):
    assert launching.takes_shortcut(iter(data)) == has


def test_the_shortcut_is_for_the_tensorflow_that_is_known(monkeypatch):
    launching.is_known.cache_clear()
    assert launching.takes_shortcut(iter(dataset()))
    launching.is_known.cache_clear()
    monkeypatch.setitem(launching._KNOWN, "tensorflow.python.data.ops.iterator_ops:Renamed.method", "another")
    assert not launching.takes_shortcut(iter(dataset()))
    launching.is_known.cache_clear()


def test_the_shortcut_is_not_for_asynchronous_execution():
    tf.config.experimental.set_synchronous_execution(False)
    try:
        assert not launching.takes_shortcut(iter(dataset()))
    finally:
        tf.config.experimental.set_synchronous_execution(True)
