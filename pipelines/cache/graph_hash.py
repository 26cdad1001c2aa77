"""Hashes traced functions: what their graphs compute, whatever names and order the nodes have.

A node's digest follows from its operation, its attributes and the digests of its inputs, and a function's from those of
the results and side effects it ends in. So nothing counts that differs between two traces of the same code.
"""

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata

from tfopt.internals.graphs import definition_of
from tfopt.pipelines.cache.value_hash import digest, hash_value
from tfopt.pipelines.shared.nondeterminism import HELD

_PYTHON = frozenset(["EagerPyFunc", "PyFunc", "PyFuncStateless"])
# Some are registered as stateful, others not.
_FILES = frozenset(
    [
        *("FixedLengthRecordDataset", "FixedLengthRecordDatasetV2", "TextLineDataset", "TFRecordDataset"),
        "TFRecordDatasetV2",
        *("CacheDataset", "GenerateVocabRemapping", "InitializeTableFromTextFile", "MatchingFiles", "ReadFile"),
        *("SnapshotChunkDataset", "SnapshotDataset", "SnapshotDatasetReader", "SnapshotDatasetV2"),
        "SnapshotNestedDatasetReader",
    ]
)
# Registered as stateful, and yet their results follow from their inputs alone.
_PURE = frozenset(
    [
        *("Assert", "Case", "CheckNumerics", "CheckNumericsV2", "DatasetToSingleElement", "DeepCopy", "GuaranteeConst"),
        *("If", "ListDataset", "LookupTableFindV2", "Print", "PrintV2", "RangeDataset", "ReduceDataset"),
        "SparseTensorSliceDataset",
        *("StatefulPartitionedCall", "StatelessRandomGetAlg", "TensorDataset", "TensorSliceDataset", "While"),
    ]
)
_OF_THE_MACHINE = frozenset(["config", "config_proto", "executor_type"])  # attributes of calls
_COMPILED = "_XlaMustCompile"  # of all attributes that begin with "_", the only one by which results may differ


def hash_graph(function: Any, *, reads_files: bool) -> tuple[str, list[str]]:
    """Returns a hash of what a concrete function computes, and whatever its results depend on besides.

    Variables, files, Python code and tables into which more can be inserted may change without a change of the graph.
    Of what depends on them, only its place is in the hash.

    Args:
        function: A concrete function, as a dataset holds it.
        reads_files: Whether the files it reads are known otherwise.

    Example:
        >>> import tensorflow as tf
        >>> double, triple = (
        ...     tf.function(lambda x, k=k: x * k).get_concrete_function(tf.TensorSpec(())) for k in (2.0, 3.0)
        ... )
        >>> hash_graph(double, reads_files=False) == hash_graph(triple, reads_files=False)
        False
    """
    graph = function.graph
    definition = graph.as_graph_def()
    walk = _Walk(definition.library.function, reads_files=reads_files)
    known = walk.nodes(definition.node, [tensor.op.name for tensor in graph.inputs])
    results = [_edge(tensor.name.removesuffix(":0"), known) for tensor in graph.outputs]
    effects = sorted(known[operation.name] for operation in graph.control_outputs)
    held = {name for node in definition.node if _looks_up_held(node) for name in node.input}
    captured = function.captured_inputs
    values: list[Any] = []
    for tensor, taken in zip(captured, graph.inputs[len(graph.inputs) - len(captured) :], strict=True):
        uses = [node for node in definition.node if taken.op.name in node.input]
        if tensor.dtype not in (tf.resource, tf.variant):
            values.append(tensor)
        elif (table := _fixed_table(tensor, uses)) is not None:
            values += table
        elif taken.op.name not in held:  # what a source holds is in its fingerprint
            walk.unseen.append("a captured dataset" if tensor.dtype == tf.variant else "a captured variable or table")
    parts: list[bytes | str] = [digest(results), digest(effects), hash_value(values, name="captured")]
    return digest(parts).hex(), walk.unseen


class _Walk:
    """Goes through a graph and the functions it calls; `unseen` grows meanwhile."""

    def __init__(self, library: Iterable[Any], *, reads_files: bool):
        self._library = {function.signature.name: function for function in library}
        self._functions: dict[str, bytes] = {}  # digests
        self._reads_files = reads_files
        self.unseen: list[str] = []

    def nodes(self, nodes: Iterable[Any], arguments: Iterable[str]) -> dict[str, bytes]:
        """Returns the digests of arguments and nodes by name."""
        by_name = {node.name: node for node in nodes}
        known = {name: digest(["argument", str(index)]) for index, name in enumerate(arguments)}
        order = TopologicalSorter({name: map(_producer, node.input) for name, node in by_name.items()})
        for name in order.static_order():
            if name not in known:
                known[name] = self._node(by_name[name], known)
        return known

    def _node(self, node: Any, known: dict[str, bytes]) -> bytes:
        inputs = [_edge(name, known) for name in node.input if not name.startswith("^")]
        before = sorted(known[_producer(name)] for name in node.input if name.startswith("^"))
        if node.op == "Assert":  # what it prints holds names of tensors, which differ from trace to trace
            inputs = inputs[:1]
        unseen = self._unseen(node.op)
        if unseen:
            self.unseen.append(f"{node.op} ({node.name}), {unseen}")
        called = self._function(node.op) if node.op in self._library else node.op
        attributes = [] if unseen else self._attributes(node.attr)
        parts: list[bytes | str] = [called, *inputs, "after", *before, "with", *attributes]
        return digest(parts)

    def _attributes(self, attributes: Any) -> list[bytes | str]:
        described: list[bytes | str] = []
        for name in sorted(attributes):
            if name in _OF_THE_MACHINE or (name.startswith("_") and name != _COMPILED):
                continue
            value = attributes[name]
            functions = [value.func] if value.HasField("func") else value.list.func
            for function in functions:
                described += [name, self._function(function.name), *self._attributes(function.attr)]
            if not functions:
                described += [name, value.SerializeToString(deterministic=True)]
        return described

    def _function(self, name: str) -> bytes:
        if name not in self._functions:
            function = self._library[name]
            known = self.nodes(function.node_def, [argument.name for argument in function.signature.input_arg])
            results = [_edge(function.ret[argument.name], known) for argument in function.signature.output_arg]
            effects = sorted(known[effect] for effect in function.control_ret.values())
            parts: list[bytes | str] = ["function", *results, "effects", *effects, *self._attributes(function.attr)]
            self._functions[name] = digest(parts)
        return self._functions[name]

    def _unseen(self, operation: str) -> str:
        """Says on what its result depends beside its inputs; "" if on nothing."""
        if operation in _PYTHON:
            return "which calls Python"
        if operation in _FILES:
            return "" if self._reads_files else "which reads files"
        if operation in self._library or operation in _PURE:
            return ""
        if not hasattr(tf.raw_ops, operation):
            return "which is none of TensorFlow's own operations"
        stateful = definition_of(operation).is_stateful
        return "which depends on more than its inputs, such as a variable, a table or a file" if stateful else ""


def _fixed_table(handle: Any, uses: Sequence[Any]) -> tuple[Any, Any] | None:
    """Keys and values of a table, in the keys' order; None if it can change, or anything but look-ups uses it."""
    kinds = {(use.attr["Tin"].type, use.attr["Tout"].type) for use in uses if use.op == "LookupTableFindV2"}
    if len(kinds) != 1 or any(use.op != "LookupTableFindV2" for use in uses):
        return None
    # These abort the process if a table has other dtypes.
    ((keys, values),) = kinds
    try:
        tf.raw_ops.LookupTableInsertV2(table_handle=handle, keys=tf.zeros(0, keys), values=tf.zeros(0, values))
    except tf.errors.UnimplementedError:
        found = tf.raw_ops.LookupTableExportV2(table_handle=handle, Tkeys=keys, Tvalues=values)
        order = np.argsort(found.keys.numpy())
        return tf.gather(found.keys, order), tf.gather(found.values, order)
    return None


def _looks_up_held(node: Any) -> bool:
    return node.op == "DatasetToSingleElement" and Metadata.FromString(node.attr["metadata"].s).name == HELD.encode()


def _producer(name: str) -> str:
    """Returns the node of an input such as "^node", "node:1" or "node:output:1"."""
    return name.removeprefix("^").partition(":")[0]


def _edge(name: str, known: dict[str, bytes]) -> bytes:
    node, _, output = name.partition(":")
    return digest([known[node], output])
