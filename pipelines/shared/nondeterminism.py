"""Finds operations in graphs and datasets that may give another result on the next call, and refuses harmful ones."""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tensorflow as tf
from tensorflow.core.framework import graph_pb2, types_pb2
from tensorflow.core.framework.dataset_metadata_pb2 import Metadata

from tfopt.internals.graphs import definition_of
from tfopt.pipelines.shared.frozen_draws import nodes
from tfopt.pipelines.shared.options import PipelineOptions

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
# Stateful operations draw if they take a seed, or have such a name.
_DRAWING = ("NonDeterministic", "Rng", "Stateful", "Timestamp")
# Keras' seed generators are variables that each call advances.
_ASSIGNING = re.compile("^Assign|Assign$|^ResourceScatter|^LookupTable(Insert|Remove)|CountUpTo$")
_INTERLEAVE = "ParallelInterleaveDataset"
_IGNORE = 1  # tf.data.experimental.ExternalStatePolicy.IGNORE

Kind = Literal["random", "assigning", "opaque", "reading", "shuffle", "unordered"]
CHANGING: tuple[Kind, ...] = ("random", "assigning", "shuffle", "unordered")
"""The kinds that change elements or their order from reading to reading."""

_DRAWS: tuple[Kind, ...] = ("random", "assigning")


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


@functools.cache
def kind_of_operation(name: str) -> Kind | None:
    """Returns the kind of an operation of TensorFlow; None if it gives the same result on each call."""
    if name in _OPAQUE:
        return "opaque"
    if name in _READING:
        return "reading"
    if not _is_stateful(name):
        return None
    definition = definition_of(name)
    if _ASSIGNING.search(name):
        return "assigning"
    takes_seed = any("seed" in part.name for part in (*definition.attr, *definition.input_arg))
    return "random" if takes_seed or name.startswith(_DRAWING) else None


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
        kind = kind_of_operation(node.op)
        if kind is not None:
            # Zeros mean no seed.
            fixed = any(node.attr[half].i != 0 for half in ("seed", "seed2") if half in node.attr)
            found.append(Finding(kind, node.op, node.name, fixed))
        elif "deterministic" in node.attr and node.attr["deterministic"].s == b"false":  # of a dataset in a function
            found.append(Finding("unordered", node.op, node.name))
    return found


def draws_of_kernels(function: Any) -> list[Finding]:
    """What in a concrete function draws random numbers from a state of its kernel, not of a variable."""
    found = [one for one in find_in_function(function) if one.kind == "random"]
    return [one for one in found if not one.operation.startswith(("Rng", "Stateful", "Cudnn"))]


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
        frozen = "the cache would freeze its result, and every epoch would be the same."
        remedy = "Move it to `augment`, which runs after the cache, or pass cache=None."
        _refuse(in_transform, _DRAWS, "a deterministic `transform`", frozen, remedy)
        remedy = "Take it out and pass it as `augment`, or pass cache=None."
        _refuse(in_source, _DRAWS, "a deterministic source", frozen, remedy)
        if options.training and not options.shuffle:
            remedy = "Pass shuffle=True instead, or cache=None."
            _refuse(
                in_source, ("shuffle",), "a source that does not shuffle", "the cache would freeze its order.", remedy
            )
    if options.seed is not None:
        broken = f"seed={options.seed} could not make it the same on every run."
        remedy = "Take it out (`shuffle` and `augment` do it under the pipeline's seed), or pass seed=None."
        _refuse(in_source, CHANGING, "a deterministic source", broken, remedy)
        remedy = "Move it to an `augment` with a keyword `seed`, or pass seed=None."
        _refuse(in_transform, _DRAWS, "a deterministic `transform`", broken, remedy)
        remedy = (
            "Give it a keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
            "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
        )
        for function, findings in zip(options.augmentations, in_augment, strict=True):
            kinds = _DRAWS if function.seeded else (*_DRAWS, "opaque")
            _refuse(findings, kinds, "an `augment` that draws from its keyword `seed` alone", broken, remedy)
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


def _refuse(findings: list[Finding], kinds: tuple[Kind, ...], expected: str, why: str, remedy: str) -> None:
    for found in findings:
        if found.kind in kinds:
            raise ValueError(f"Expected {expected}. It holds {found}: {why} {remedy}")


def _is_stateful(operation: str) -> bool:
    definition = definition_of(operation)  # none for a call of a function
    return definition is not None and definition.is_stateful and operation not in _WITHOUT_STATE


def _has_state(node: Any) -> bool:
    # TensorFlow registers the operations that make datasets as stateful.
    makes_dataset = [types_pb2.DT_VARIANT]
    return _is_stateful(node.op) and [out.type for out in definition_of(node.op).output_arg] != makes_dataset


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
