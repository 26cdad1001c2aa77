"""What of a traced function is in its hash. Kinds of programs are in test_key.py."""

import re

import pytest
import tensorflow as tf

from tfopt.internals.graphs import definition_of
from tfopt.pipelines.cache.graph_hash import _FILES, _PURE, _Walk, hash_graph
from tfopt.pipelines.shared.nondeterminism import kind_of_operation
from tfopt.pipelines.sources.source import held_on_host

# Inputs and attributes by which an operation is given a file, or another place outside of the program.
PLACE = re.compile(r"(^|_)(files?|filenames?|file_?patterns?|paths?|directory|dir|prefix|address|urls?)$")


def hashed(function, *, reads_files=False):
    dataset = tf.data.Dataset.from_tensors(tf.zeros(3)).map(function)
    return hash_graph(dataset._map_func.function, reads_files=reads_files)


def test_neither_order_nor_names_of_nodes_count():
    def one(x):
        a, b = x + 1, x * 2
        return a - b

    def other(x):
        second = tf.multiply(x, 2, name="second")
        first = tf.add(x, 1, name="first")
        return first - second

    assert hashed(one) == hashed(other)
    assert hashed(one) != hashed(lambda x: x * 2 - (x + 1))


def test_an_output_of_an_operation_is_told_from_another():
    assert hashed(lambda x: tf.split(x, 3)[0]) != hashed(lambda x: tf.split(x, 3)[1])
    split = tf.function(lambda x: (x + 1, x + 2))
    assert hashed(lambda x: split(x)[0]) != hashed(lambda x: split(x)[1])


def test_the_same_tensors_captured_in_another_order_are_told_apart():
    a, b = tf.range(99.0), -tf.range(99.0)
    assert hashed(lambda x: x + a[1] / b[2]) == hashed(lambda x: x + a[1] / b[2]) != hashed(lambda x: x + b[1] / a[2])


def test_a_call_that_depends_on_the_machine_counts_as_on_another(monkeypatch):
    called = tf.function(lambda x: x + 1)
    before = hashed(lambda x: called(x))
    tf.config.optimizer.set_experimental_options({"debug_stripper": True})  # it is written into calls
    try:
        assert hashed(lambda x: called(x)) == before
    finally:
        tf.config.optimizer.set_experimental_options({"debug_stripper": False})
    with tf.device("CPU:0"):
        assert hashed(lambda x: called(x)) == before


@pytest.mark.parametrize("rows", [3, 2**23])
def test_what_a_source_holds_is_no_captured_dataset(rows):
    """Large tensors of its own lie in a dataset, whose content its fingerprint has."""
    held = tf.zeros(rows)
    assert hashed(lambda x: x + held_on_host(lambda: held)[0])[1] == []
    own = tf.data.Dataset.from_tensors(held)
    assert hashed(lambda x: x + own.get_single_element()[0])[1] == ["a captured dataset"]


def test_operations_that_are_given_a_place_outside_are_refused():
    walk = _Walk([], reads_files=False)
    only_told = {"CTCBeamSearchDecoder", "TensorSliceDataset", "RegisterDataset", "RegisterDatasetV2"}
    only_told |= {"DebugIdentity", "DebugNanCount", "DebugNumericSummary"}  # none of them reads there
    for name in dir(tf.raw_ops):
        definition = definition_of(name)
        if definition is not None and name not in only_told:
            parts = [*definition.input_arg, *definition.attr]
            if any(PLACE.search(part.name) for part in parts):
                assert walk._unseen(name), name


def test_listed_operations_exist_and_none_that_draws_is_pure():
    assert all(definition_of(name) is not None for name in _PURE | _FILES)
    assert "random" not in map(kind_of_operation, _PURE)
    assert all(definition_of(name).is_stateful for name in _PURE)
    assert _Walk([], reads_files=False)._unseen("Timestamp")
    assert _Walk([], reads_files=False)._unseen("Text>Tokenize") == "which is none of TensorFlow's own operations"
