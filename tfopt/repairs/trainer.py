"""Defects of Keras' trainer.

- `multi_worker`, `replica_executions`: `fit`, `evaluate` and `predict` fail under tf.distribute strategies.
- D20, `shuffle_warning`: `fit` warns of a shuffle that nobody asked for.
"""

import inspect
import itertools
import warnings
from contextlib import suppress
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as loss_module
from keras.src.trainers.data_adapters import data_adapter_utils

from tfopt.errors import UnsupportedError
from tfopt.repairs.repair import Function, Repair

_MODULE = "keras.src.backend.tensorflow.trainer"
_TRAINER = f"{_MODULE}:TensorFlowTrainer"


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
        f"{_MODULE}:reduce_per_replica": frozenset({"ecf2ff48d4d6dbb6"}),
        f"{_TRAINER}._maybe_symbolic_build": frozenset({"f8854e57c6c86238"}),
    },
    replace={
        f"{_MODULE}:reduce_per_replica": _reducing_scalars,
        f"{_TRAINER}._maybe_symbolic_build": _building_from_a_local_batch,
    },
    without="Train in one process, or write your own training loop under the strategy.",
)


def _replicas(model: Any) -> int:
    return int(model.distribute_strategy.num_replicas_in_sync)


def _one_by_one(original: Function) -> Function:
    def _make_function(self: Any, step_function: Function) -> Function:
        if _replicas(self) == 1:
            return original(self, step_function)
        if self.jit_compile and type(self).train_step is not TensorFlowTrainer.train_step:
            warnings.warn(
                f"Expected Keras' own train_step under jit_compile=True with several replicas. Found: "
                f"{type(self).__name__}.train_step, of which XLA compiles only calls of super().train_step. Compute "
                "its gradients in a tf.function(jit_compile=True).",
                stacklevel=2,
            )
        compiled, self._jit_compile = self._jit_compile, False  # XLA cannot compile the step, which spans devices
        try:
            function = original(self, step_function)
        finally:
            self._jit_compile = compiled
        if self.steps_per_execution == 1:
            return function
        one_step_on_data = inspect.getclosurevars(function).nonlocals["one_step_on_data"]

        def steps(iterator: Any) -> Any:
            """Runs the steps of an execution one by one, since one graph cannot hold them."""
            outputs = None
            for _ in range(self.steps_per_execution):
                batch = next(iterator, None)
                if batch is None:
                    break
                outputs = one_step_on_data(batch)
            if outputs is None:
                raise StopIteration
            return outputs

        return steps

    return _make_function


def _differentiating(original: Function) -> Function:
    def train_step(self: Any, data: Any) -> Any:
        if _replicas(self) == 1 or not self.jit_compile or self.run_eagerly or not self.trainable_weights:
            return original(self, data)
        x, y, sample_weight = data_adapter_utils.unpack_x_y_sample_weight(data)
        examples = tf.shape(next(part for part in keras.tree.flatten(x) if part is not None))[0]
        weights = self.trainable_weights

        @tf.function(jit_compile=True, autograph=False)
        def differentiate(x: Any, y: Any, sample_weight: Any) -> Any:
            with tf.GradientTape() as tape:
                training = {"training": True} if self._call_has_training_arg else {}
                y_pred = self(x, **training)
                loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
                scaled = self.optimizer.scale_loss(loss)
            return loss, y_pred, tape.gradient(scaled, weights)

        try:
            loss, y_pred, gradients = differentiate(x, y, sample_weight)
        except RuntimeError as error:
            if "merge_call" not in str(error):
                raise
            raise UnsupportedError(
                "Expected a forward and backward pass that works without the other replicas, under jit_compile=True. "
                "Found: one that synchronises, through BatchNormalization(synchronized=True), a mask, or a loss that "
                "divides by the sum of its sample weights. Compile with jit_compile=False."
            ) from error
        self._loss_tracker.update_state(loss_module.unscale_loss_for_distribution(loss), sample_weight=examples)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return train_step


REPLICA_EXECUTIONS = Repair(
    name="replica_executions",
    defect=(
        "Under a tf.distribute strategy with several replicas, fit fails with steps_per_execution > 1 and with "
        "jit_compile=True."
    ),
    reference="Keras, TensorFlowTrainer._make_function; no upstream report was found.",
    broken={
        f"{_TRAINER}._make_function": frozenset({"703051878417df76"}),
        f"{_TRAINER}.train_step": frozenset({"f6ecb19499b554c4"}),
    },
    replace={
        f"{_TRAINER}._make_function": _one_by_one,
        f"{_TRAINER}.train_step": _differentiating,
    },
    without="Compile with jit_compile=False and steps_per_execution=1.",
)


_ORDER_DECIDED = "_tfopt_order_decided"  # an attribute of datasets


def mark_order_decided(dataset: Any) -> Any:
    """Returns a dataset marked as one whose order was decided when it was made: `fit` no longer warns of its shuffle.

    Installs the repair; a version of Keras that it does not know goes on warning.
    """
    with suppress(UnsupportedError):
        SHUFFLE_WARNING.install()
    setattr(dataset, _ORDER_DECIDED, True)
    return dataset


def _without_a_shuffle(original: Function) -> Function:
    # Wraps the caller of the function that warns: the warning points at that caller, and still should.
    def begin(self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("shuffle") and getattr(x, _ORDER_DECIDED, False):
            kwargs["shuffle"] = False  # which Keras ignores anyway
        original(self, x, *args, **kwargs)

    return begin


SHUFFLE_WARNING = Repair(
    name="shuffle_warning",
    defect=(
        "fit warns that `shuffle=True` was passed for every tf.data.Dataset, though it is "
        "only the default and the dataset may be shuffled."
    ),
    reference="Keras, get_data_adapter in keras/src/trainers/data_adapters; no upstream report was found.",
    broken={"keras.src.trainers.epoch_iterator:EpochIterator.__init__": frozenset({"0c220ae28381002f"})},
    replace={"keras.src.trainers.epoch_iterator:EpochIterator.__init__": _without_a_shuffle},
    without="Pass shuffle=False to fit.",
)
