"""Finds operations in graphs and datasets that may give another result on the next call, and refuses harmful ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata
from tensorflow.python.framework import op_def_registry

from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.options import PipelineOptions

# Every registered stateful operation that draws random numbers; a test compares this with TensorFlow's registry.
_RANDOM = frozenset(
    [
        *("AllCandidateSampler", "AnonymousRandomSeedGenerator", "AnonymousSeedGenerator", "CudnnRNN"),
        *("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", "CudnnRNNV2", "CudnnRNNV3"),
        *("ExperimentalRandomDataset", "FixedUnigramCandidateSampler", "LearnedUnigramCandidateSampler"),
        *("LogUniformCandidateSampler", "Multinomial", "NonDeterministicInts", "ParameterizedTruncatedNormal"),
        *("RandomCrop", "RandomDataset", "RandomDatasetV2", "RandomGamma", "RandomPoisson", "RandomPoissonV2"),
        *("RandomShuffle", "RandomShuffleQueue", "RandomShuffleQueueV2", "RandomStandardNormal", "RandomUniform"),
        *("RandomUniformInt", "RngReadAndSkip", "RngSkip", "SampleDistortedBoundingBox"),
        *("SampleDistortedBoundingBoxV2", "ShuffleAndRepeatDataset", "ShuffleAndRepeatDatasetV2", "ShuffleDataset"),
        *("ShuffleDatasetV2", "ShuffleDatasetV3", "StatefulRandomBinomial", "StatefulStandardNormal"),
        *("StatefulStandardNormalV2", "StatefulTruncatedNormal", "StatefulUniform", "StatefulUniformFullInt"),
        *("StatefulUniformInt", "ThreadUnsafeUnigramCandidateSampler", "Timestamp", "TruncatedNormal"),
        "UniformCandidateSampler",
    ]
)
# Keras' seed generators are variables that each call advances.
_ASSIGNING = frozenset(
    [
        *("AssignAddVariableOp", "AssignSubVariableOp", "AssignVariableOp", "LookupTableInsertV2"),
        *("LookupTableRemoveV2", "ResourceCountUpTo", "ResourceScatterAdd", "ResourceScatterDiv"),
        *("ResourceScatterMax", "ResourceScatterMin", "ResourceScatterMul", "ResourceScatterNdAdd"),
        *("ResourceScatterNdMax", "ResourceScatterNdMin", "ResourceScatterNdSub", "ResourceScatterNdUpdate"),
        *("ResourceScatterSub", "ResourceScatterUpdate", "ResourceStridedSliceAssign"),
    ]
)
HELD = "held_on_host"  # the name of look-ups of tensors that a source holds for a function
_OPAQUE = ("EagerPyFunc", "PyFunc")  # PyFuncStateless is the caller's promise that it is not
_READING = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
# Registered as stateful, and yet a saved iterator lacks nothing of theirs; what the first ones call is looked at too.
_WITHOUT_STATE = frozenset(
    [
        *("Case", "If", "StatefulPartitionedCall", "While"),
        *("Assert", "CheckNumerics", "CheckNumericsV2", "LookupTableFindV2", "LookupTableSizeV2", "Print", "PrintV2"),
    ]
)
_INTERLEAVE = "ParallelInterleaveDataset"
_IGNORE = 1  # tf.data.experimental.ExternalStatePolicy.IGNORE

Kind = Literal["random", "assigning", "opaque", "reading", "shuffle", "unordered"]
CHANGING: tuple[Kind, ...] = ("random", "assigning", "shuffle", "unordered")
"""The kinds that change elements or their order from reading to reading."""

_KINDS: dict[str, Kind] = {
    **dict.fromkeys(_RANDOM, "random"),
    **dict.fromkeys(_ASSIGNING, "assigning"),
    **dict.fromkeys(_OPAQUE, "opaque"),
    **dict.fromkeys(_READING, "reading"),
}


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

    @property
    def reorders(self) -> bool:
        """Whether it gives a dataset another order; random operations on single elements do not."""
        return self.kind in ("shuffle", "unordered") or (self.kind == "random" and "Dataset" in self.operation)

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
    found = []
    for node in nodes(function):
        if node.op in _KINDS:
            # Zeros mean no seed.
            fixed = any(node.attr[half].i != 0 for half in ("seed", "seed2") if half in node.attr)
            found.append(Finding(_KINDS[node.op], node.op, node.name, fixed))
        elif "deterministic" in node.attr and node.attr["deterministic"].s == b"false":  # of a dataset in a function
            found.append(Finding("unordered", node.op, node.name))
    return found


def runs_python(dataset: Any) -> bool:
    """Whether a function of a dataset calls Python; those of the datasets it reads from do not count."""
    called = (node.op for wrapped in dataset._functions() for node in nodes(wrapped.function))
    return any(operation in (*_OPAQUE, "PyFuncStateless") for operation in called)


def find_in_dataset(dataset: Any) -> list[Finding]:
    """Finds such operations in the functions of a dataset and all datasets it reads from."""
    return [finding for stage in lineage(dataset) for finding in _in_stage(stage)]


def find_states(dataset: Any) -> set[str]:
    """Returns what functions of a dataset, or of those it reads from, keep that a saved iterator would lack.

    An operation is given by its type; a look-up of a dataset's only element by the name `get_single_element` was given.
    """
    functions = (wrapped.function for stage in lineage(dataset) for wrapped in stage._functions())
    found = (node for function in functions for node in nodes(function) if _has_state(node))
    return {Metadata.FromString(node.attr["metadata"].s).name.decode() or node.op for node in found}


def lineage(dataset: Any) -> Iterator[Any]:
    """Yields a dataset and all datasets it reads from."""
    waiting, seen = [dataset], set()
    while waiting:
        stage = waiting.pop()
        if id(stage) not in seen:
            seen.add(id(stage))
            yield stage
            waiting += stage._inputs()


def refuse_draws(
    options: PipelineOptions, in_source: list[Finding], in_transform: list[Finding], in_augment: list[list[Finding]]
) -> None:
    """Refuses random operations that a cache would freeze, a seed could not repeat, or an epoch would repeat."""
    # Also if cache="auto" finds no room: whether a model trains on fresh draws must not depend on free memory.
    if options.cache is not None:
        _refuse_frozen(options, in_source, in_transform)
    if options.seed is not None:
        _refuse_unrepeatable(options, in_source, in_transform, in_augment)
    refuse_restarting("transform", in_transform)
    for findings in in_augment:
        refuse_restarting("augment", findings)


def refuse_restarting(stage: str, findings: list[Finding]) -> None:
    """Refuses random operations with a fixed seed, whose draws TensorFlow repeats in every epoch."""
    for found in findings:
        if found.restarts:
            raise ValueError(
                f"Expected {stage!r} to draw new numbers in each epoch. It holds {found} with a fixed seed, from an "
                "argument or from tf.random.set_seed (which keras.utils.set_random_seed calls): in a dataset it "
                "repeats its draws in every epoch. Use an `augment` with a keyword `seed` (int32, shape (2,)) and "
                "stateless operations, such as tf.image.stateless_random_flip_left_right(image, seed)."
            )


def _refuse_frozen(options: PipelineOptions, in_source: list[Finding], in_transform: list[Finding]) -> None:
    frozen = "the cache would freeze its result, and every epoch would be the same."
    for found in _only(in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {frozen} Move it to `augment`, which runs "
            "after the cache, or pass cache=None."
        )
    for found in _only(in_source, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {frozen} Take it out and pass it as `augment`, or "
            "pass cache=None."
        )
    for found in _only(in_source, "shuffle"):
        if options.training and not options.shuffle:
            raise ValueError(
                f"Expected a source that does not shuffle. It holds {found}: the cache would freeze its order. Pass "
                "shuffle=True instead, or cache=None."
            )


def _refuse_unrepeatable(
    options: PipelineOptions, in_source: list[Finding], in_transform: list[Finding], in_augment: list[list[Finding]]
) -> None:
    broken = f"seed={options.seed} could not make it the same on every run."
    for found in _only(in_source, *CHANGING):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {broken} Take it out (`shuffle` and `augment` do it "
            "under the pipeline's seed), or pass seed=None."
        )
    for found in _only(in_transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {broken} Move it to an `augment` with a keyword "
            "`seed`, or pass seed=None."
        )
    draws = ("random", "assigning")
    for function, findings in zip(options.augmentations, in_augment, strict=True):
        for found in _only(findings, *(draws if function.seeded else (*draws, "opaque"))):
            raise ValueError(
                f"Expected an `augment` that draws from its keyword `seed` alone. It holds {found}: {broken} Give it "
                "a keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
                "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
            )


def _only(findings: list[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]


def _has_state(node: Any) -> bool:
    definition = op_def_registry.get(node.op)  # none for a call of a function
    if definition is None or not definition.is_stateful or node.op in _WITHOUT_STATE:
        return False
    # TensorFlow registers the operations that make datasets as stateful.
    return [output.type for output in definition.output_arg] != [types_pb2.DT_VARIANT]


def _in_stage(stage: Any) -> list[Finding]:
    kind = type(stage).__name__
    found = [finding for wrapped in stage._functions() for finding in find_in_function(wrapped.function)]
    if kind == "_ShuffleDataset" and not (_is_seeded(stage) and stage._reshuffle_each_iteration is False):
        found.append(Finding("shuffle", "Dataset.shuffle", ""))
    if _loses_order(stage):
        found.append(Finding("unordered", f"{kind.strip('_')} with deterministic=False", ""))
    if kind == "_RandomDataset" and (stage._rerandomize or not _is_seeded(stage)):
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


def _is_seeded(stage: Any) -> bool:
    return int(stage._seed) != 0 or int(stage._seed2) != 0  # TensorFlow turns a missing seed into (0, 0)
