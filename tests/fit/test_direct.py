"""The shortest way to a step leads where the long one does, and is left where TensorFlow is another."""

import pytest
import tensorflow as tf
from fitting import Pair, X, Y, dataset
from tensorflow.python.data.ops.iterator_ops import OwnedIterator

from tfopt.fit import direct


def taken(data):
    return [[part.numpy().tolist() for part in batch] for batch in data]


@pytest.mark.parametrize("known", [True, False])
def test_it_trains_the_same_with_it_and_without(monkeypatch, known):
    asked = []
    monkeypatch.setattr(direct, "_is_known", lambda: asked.append(known) or known)
    weighted = tf.data.Dataset.from_tensor_slices((X, Y, abs(X[:, 0]))).batch(16)
    Pair().train(lambda model: model.fit(weighted, epochs=2, verbose=0, shuffle=False).history)
    assert asked


def test_it_takes_what_next_does():
    iterator = iter(dataset())
    batches = [direct.take_directly(iterator, None) for _ in range(3)]
    assert taken(batches) == taken(dataset())
    assert direct.take_directly(iterator, None) is None


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
def test_it_is_for_tuples_of_tensors(data, has):
    assert direct.has_direct_way(iter(data)) == has


def test_it_is_for_the_tensorflow_that_is_known(monkeypatch):
    direct._is_known.cache_clear()
    assert direct.has_direct_way(iter(dataset()))
    direct._is_known.cache_clear()
    monkeypatch.setitem(direct._KNOWN, OwnedIterator._next_internal, "another")
    assert not direct.has_direct_way(iter(dataset()))
    direct._is_known.cache_clear()


def test_it_is_not_for_asynchronous_execution():
    tf.config.experimental.set_synchronous_execution(False)
    try:
        assert not direct.has_direct_way(iter(dataset()))
    finally:
        tf.config.experimental.set_synchronous_execution(True)
