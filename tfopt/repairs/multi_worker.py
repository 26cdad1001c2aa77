"""`fit`, `evaluate` and `predict` fail under MultiWorkerMirroredStrategy in stock Keras."""

import itertools
from typing import Any

import keras
import tensorflow as tf

from tfopt.repairs.repair import Function, Repair

_TRAINER = "keras.src.backend.tensorflow.trainer"


def _spans_workers(strategy: tf.distribute.Strategy) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and strategy.extended._in_multi_worker_mode()


def _reducing_scalars(original: Function) -> Function:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        leaves = keras.tree.flatten(values)
        if reduction not in ("auto", "mean") or not leaves or not _spans_workers(strategy):
            return original(values, strategy, reduction)

        def mean(*logs: Any) -> Any:
            # One collective operation for all logs, so that all workers see the same ones and stop together.
            together = tf.stack([tf.cast(log, tf.float32) for log in logs])
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, together)

        means = strategy.experimental_local_results(strategy.run(mean, args=leaves))[0]
        return keras.tree.pack_sequence_as(values, tf.unstack(means, num=len(leaves)))

    return reduce_per_replica


def _building_from_a_local_batch(original: Function) -> Function:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        strategy = self.distribute_strategy
        if iterator is None or strategy.num_replicas_in_sync == 1:
            original(self, iterator=iterator, data_batch=data_batch)
            return
        for _, _, batches in itertools.islice(iterator, 1):
            batch = keras.tree.map_structure(lambda part: strategy.experimental_local_results(part)[0], next(batches))
            original(self, data_batch=batch)

    return _maybe_symbolic_build


MULTI_WORKER = Repair(
    name="multi_worker",
    defect=(
        "fit, evaluate and predict fail under MultiWorkerMirroredStrategy, and under any strategy if the first batch "
        "splits unevenly: Keras averages the replicas' batches to learn their shape, and averages scalar logs along "
        "an axis that they do not have."
    ),
    reference="keras#20585, keras#20329, ray#47464.",
    broken={
        f"{_TRAINER}:reduce_per_replica": frozenset({"ecf2ff48d4d6dbb6"}),
        f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build": frozenset({"f8854e57c6c86238"}),
    },
    replace={
        f"{_TRAINER}:reduce_per_replica": _reducing_scalars,
        f"{_TRAINER}:TensorFlowTrainer._maybe_symbolic_build": _building_from_a_local_batch,
    },
    without="Train in one process, or write your own training loop under the strategy.",
)
