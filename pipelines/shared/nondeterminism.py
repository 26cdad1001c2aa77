"""Finds operations in TensorFlow graphs and datasets that may give another result on the next call.

Python's and NumPy's random functions leave no operation in a graph: they run once, when TensorFlow traces the function,
and their draw becomes a constant. Comparing the `contents` of two traces finds them.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2

# Every registered stateful operation that draws random numbers; a test compares this with TensorFlow's registry.
_RANDOM = frozenset(
    [
        "AllCandidateSampler",
        "AnonymousRandomSeedGenerator",
        "AnonymousSeedGenerator",
        "FixedUnigramCandidateSampler",
        "LearnedUnigramCandidateSampler",
        "LogUniformCandidateSampler",
        "Multinomial",
        "NonDeterministicInts",
        "ParameterizedTruncatedNormal",
        "RandomCrop",
        "RandomDataset",
        "RandomDatasetV2",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RandomShuffle",
        "RandomShuffleQueue",
        "RandomShuffleQueueV2",
        "RandomStandardNormal",
        "RandomUniform",
        "RandomUniformInt",
        "RngReadAndSkip",
        "RngSkip",
        "SampleDistortedBoundingBox",
        "SampleDistortedBoundingBoxV2",
        "ShuffleAndRepeatDatasetV2",
        "ShuffleDatasetV2",
        "ShuffleDatasetV3",
        "StatefulRandomBinomial",
        "StatefulStandardNormal",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
        "ThreadUnsafeUnigramCandidateSampler",
        "TruncatedNormal",
        "UniformCandidateSampler",
        "ExperimentalRandomDataset",
        "CudnnRNN",
        "CudnnRNNBackprop",
        "CudnnRNNBackpropV2",
        "CudnnRNNBackpropV3",
        "CudnnRNNV2",
        "CudnnRNNV3",
        "Timestamp",
        "ShuffleDataset",
        "ShuffleAndRepeatDataset",
    ]
)
# Keras' seed generators are variables that each call advances.
_ASSIGNING = frozenset(
    [
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "ResourceCountUpTo",
        "ResourceScatterAdd",
        "ResourceScatterDiv",
        "ResourceScatterMax",
        "ResourceScatterMin",
        "ResourceScatterMul",
        "ResourceScatterNdAdd",
        "ResourceScatterNdMax",
        "ResourceScatterNdMin",
        "ResourceScatterNdSub",
        "ResourceScatterNdUpdate",
        "ResourceScatterSub",
        "ResourceScatterUpdate",
        "ResourceStridedSliceAssign",
        "LookupTableInsertV2",
        "LookupTableRemoveV2",
    ]
)
_OPAQUE = frozenset({"EagerPyFunc", "PyFunc"})  # PyFuncStateless is the caller's promise that it is not
_INTERLEAVE = "ParallelInterleaveDataset"
_IGNORE = 1  # tf.data.experimental.ExternalStatePolicy.IGNORE
_READING = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd"})

Kind = Literal["random", "assigning", "opaque", "reading", "shuffle", "unordered"]


@dataclass(frozen=True, slots=True)
class Finding:
    """An operation whose result may differ from call to call."""

    # "random"; "assigning": changes a variable or table; "opaque": calls Python, which may do anything; "reading":
    # reads a variable, which may change; "shuffle": a shuffle whose order differs by iteration or process;
    # "unordered": a parallel stage that does not keep the order
    kind: Kind
    operation: str  # its type, such as "RandomUniform"
    name: str  # in the graph
    # Whether its seed is fixed, by an argument or by `tf.random.set_seed`, so that it repeats its draws in each
    # iteration of a dataset.
    restarts: bool = False

    def __str__(self) -> str:
        return f"{self.operation} ({self.name})" if self.name else self.operation


def find_in_function(function: Any) -> list[Finding]:
    """Finds such operations in a concrete function and all functions it calls.

    Example:
        >>> import tensorflow as tf
        >>> noisy = tf.function(lambda x: x + tf.random.normal(())).get_concrete_function(tf.TensorSpec(()))
        >>> [finding.operation for finding in find_in_function(noisy)]
        ['RandomStandardNormal']
    """
    return [finding for node in _nodes(function) if (finding := _classify(node))]


def find_in_dataset(dataset: Any) -> list[Finding]:
    """Finds such operations in the functions of a dataset and all datasets it reads from."""
    return [finding for stage in lineage(dataset) for finding in _in_stage(stage)]


def contents(function: Any) -> Counter[tuple[str, bytes]]:
    """Counts the operations of a concrete function and those it calls; constants by their serialised value.

    Names are left out, and string constants, which hold names in asserts: those differ from trace to trace.
    """
    return Counter((node.op, _value(node)) for node in _nodes(function))


def _value(node: Any) -> bytes:
    constant = node.attr["value"] if node.op == "Const" else None
    return b"" if constant is None or constant.tensor.dtype == types_pb2.DT_STRING else constant.SerializeToString()


def _nodes(function: Any) -> list[Any]:
    graph = function.graph.as_graph_def()
    return [*graph.node, *(node for nested in graph.library.function for node in nested.node_def)]


def _classify(node: Any) -> Finding | None:
    kinds: list[tuple[Kind, frozenset[str]]] = [
        ("random", _RANDOM),
        ("assigning", _ASSIGNING),
        ("opaque", _OPAQUE),
        ("reading", _READING),
    ]
    # Zeros mean no seed.
    fixed = any(node.attr[half].i != 0 for half in ("seed", "seed2") if half in node.attr)
    found = (Finding(kind, node.op, node.name, fixed) for kind, operations in kinds if node.op in operations)
    return next(found, None)


def lineage(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all datasets it reads from."""
    waiting, seen = [dataset], set()
    while waiting:
        stage = waiting.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            waiting += stage._inputs()


def _in_stage(stage: Any) -> list[Finding]:
    kind = type(stage).__name__
    found = [finding for wrapped in stage._functions() for finding in find_in_function(wrapped.function)]
    if kind == "_ShuffleDataset" and not _same_every_time(stage):
        found.append(Finding("shuffle", "Dataset.shuffle", ""))
    if _loses_order(stage):
        found.append(Finding("unordered", f"{kind.strip('_')} with deterministic=False", ""))
    if kind == "_RandomDataset":
        found.append(Finding("random", "Dataset.random", ""))
    return found


def _loses_order(stage: Any) -> bool:
    if type(stage).__name__ == "_OptionsDataset":
        return stage.options().deterministic is False
    if type(stage).__name__ == "_ParallelInterleaveDataset":  # it keeps no attribute for it
        graph = tf.raw_ops.DatasetToGraphV2(input_dataset=stage._variant_tensor, external_state_policy=_IGNORE)
        nodes = graph_pb2.GraphDef.FromString(graph.numpy()).node
        return any(node.attr["deterministic"].s == b"false" for node in nodes if node.op.startswith(_INTERLEAVE))
    return getattr(stage, "_deterministic", None) == "false"


def _same_every_time(shuffle: Any) -> bool:
    # TensorFlow turns a missing seed into (0, 0), and a missing reshuffle_each_iteration into True.
    seeded = int(shuffle._seed) != 0 or int(shuffle._seed2) != 0
    return seeded and shuffle._reshuffle_each_iteration is False
