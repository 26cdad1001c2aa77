"""Batches of any size, made of the examples that the data hold."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from tfopt.errors import PipelineError, UnsupportedError, summarize_error
from tfopt.model.batches import DEVICE_STAGE, Data, as_dataset, first_batch, looked_at, specs_of

_MOST_BATCHES = 16  # read from the data; larger batches repeat their examples
_SHUFFLES = ("ShuffleDatasetV3", "ShuffleAndRepeatDatasetV2")


class Examples:
    """The examples of the data's first batches, read as they are needed.

    Raises:
        TypeError: If `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: If the data hold no example, or cannot be read.
        tfopt.errors.UnsupportedError: If a part of the batch is sparse or ragged, or its first axis is not the batch.
    """

    def __init__(self, model: keras.Model, data: Data):
        dataset = as_dataset(data)
        self._batches: Iterator[Any] = iter(())
        with _reading():
            if getattr(dataset, DEVICE_STAGE, None) is None:
                self._batches = iter(_apart(dataset))
                with looked_at(dataset):
                    self.first = next(self._batches, None)
            else:
                self.first = first_batch(model, dataset)
        """The first batch, as the dataset yields it."""
        self.batch_size = _count(self.first)
        """Examples in it."""
        self._batched = [
            part is not None and part.shape.rank > 0 and part.shape[0] == self.batch_size
            for part in tf.nest.flatten(self.first)
        ]
        """Which parts have an entry per example; others, such as a scalar, stay as they are."""
        self._parts = _arrays(self.first)
        self._read = 1

    def batch(self, size: int) -> Any:
        """Returns a batch of `size` examples, as arrays: the first ones, and from the first again if they run out."""
        while self._have() < size and self._read < _MOST_BATCHES and self._read_one():
            pass
        chosen = np.arange(size) % self._have()
        parts = [part[chosen] if batched else part for part, batched in zip(self._parts, self._batched, strict=True)]
        return tf.nest.pack_sequence_as(self.first, parts)

    def _have(self) -> int:
        return next(len(part) for part, batched in zip(self._parts, self._batched, strict=True) if batched)

    def _read_one(self) -> bool:
        """Reads one more batch, if there is one; those padded to another length cannot be joined and are left out."""
        with _reading():
            batch = next(self._batches, None)
        if batch is None:
            return False
        self._read += 1
        found = _arrays(batch)
        pairs = [pair for *pair, batched in zip(self._parts, found, self._batched, strict=True) if batched]
        if all(one.shape[1:] == other.shape[1:] for one, other in pairs):
            self._parts = [
                np.concatenate([one, other]) if batched else one
                for one, other, batched in zip(self._parts, found, self._batched, strict=True)
            ]
        return True


def _arrays(batch: Any) -> list[Any]:
    return [None if part is None else part.numpy() for part in tf.nest.flatten(batch)]


def _count(batch: Any) -> int:
    """Examples in a batch; raises if it holds none."""
    if batch is None:
        raise PipelineError(
            "Expected a dataset of at least one batch. Found none. Check its source; with drop_remainder=True it also "
            "needs at least batch_size examples, and a generator yields only once."
        )
    parts = [part for part in tf.nest.flatten(batch) if part is not None]
    if not all(isinstance(part, tf.Tensor) for part in parts):
        kinds = sorted({type(part).__name__ for part in parts if not isinstance(part, tf.Tensor)})
        raise UnsupportedError(
            f"Expected dense tensors in a batch. Found: {', '.join(kinds)}. Convert them with .to_tensor() or "
            "tf.sparse.to_dense; batches of several replicas cannot be used."
        )
    if not parts[0].shape.rank:
        raise UnsupportedError(
            f"Expected batches whose first axis is the batch. Found: {specs_of(batch)}. Batch the dataset first: "
            "dataset.batch(32)."
        )
    if not parts[0].shape[0]:
        raise PipelineError(
            f"Expected batches of at least one example. Found: {specs_of(batch)}. Check the dataset's source and its "
            "filters."
        )
    return int(parts[0].shape[0])


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except tf.errors.OpError as error:
        raise PipelineError(
            f"Expected data that can be read. Found: {summarize_error(error)}. Check the dataset's source."
        ) from error


def _apart(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """A copy of a shuffled dataset to read from: each iterator of the dataset itself would use up one of its orders."""
    if not _shuffles(dataset):
        return dataset
    try:
        graph = graph_pb2.GraphDef.FromString(
            dataset._as_serialized_graph(external_state_policy=tf.data.experimental.ExternalStatePolicy.IGNORE).numpy()
        )
        return _rebuilt(graph, dataset.element_spec)
    except (tf.errors.OpError, ValueError):  # such as data of over 2 GB, or a stage on another device
        return dataset


def _shuffles(dataset: tf.data.Dataset) -> bool:
    return "Shuffle" in type(dataset).__name__ or any(map(_shuffles, dataset._inputs()))


def _rebuilt(graph: graph_pb2.GraphDef, element_spec: Any) -> tf.data.Dataset:
    """The dataset of a graph, whose shuffles draw their orders apart."""
    (end,) = (node for node in graph.node if node.op == "_Retval")
    output = end.input[0] if ":" in end.input[0] else f"{end.input[0]}:0"
    graph.node.remove(end)
    for number, node in enumerate(list(graph.node)):
        if node.op in _SHUFFLES:
            again, seeds = graph.node.add(), graph.node.add()
            again.name, again.op = f"again_{number}", "Const"
            again.attr["dtype"].type = tf.bool.as_datatype_enum
            again.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(node.attr["reshuffle_each_iteration"].b))
            seeds.name, seeds.op = f"seeds_{number}", "AnonymousSeedGenerator"
            seeds.input.extend([*node.input[2:4], again.name])
            node.input[4] = seeds.name

    def load() -> Any:
        return tf.graph_util.import_graph_def(graph, return_elements=[output], name="")[0]

    return tf.data.experimental.from_variant(tf.function(load).get_concrete_function()(), element_spec)
