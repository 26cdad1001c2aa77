"""What fails under tf.distribute strategies.

- `multi_worker`, `replica_executions`: `fit`, `evaluate` and `predict`.
- `shared_files`: models that several workers save to one path.
"""

import inspect
import itertools
import os
import warnings
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.internals.training import has_keras_own, unscale_loss_for_distribution
from tfopt.repairs.fit_data import explained_input_errors
from tfopt.repairs.probes import in_workers, on_replicas
from tfopt.repairs.repair import Function, Repair

_SAVING, _FILES = "keras.src.saving.saving_lib", "keras.src.utils.file_utils"
_HDF5 = "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5"
_BACKUP = "keras.src.callbacks.backup_and_restore:BackupAndRestore"
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
            together = tf.concat([tf.reshape(tf.cast(log, tf.float32), [-1]) for log in logs], axis=0)
            means = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, together)
            parts = tf.split(means, [tf.size(log) for log in logs], num=len(logs))
            return [tf.reshape(part, tf.shape(log)) for part, log in zip(parts, logs, strict=True)]

        means = strategy.run(mean, args=leaves)
        means = [strategy.experimental_local_results(part)[0] for part in means]
        return keras.tree.pack_sequence_as(values, means)

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


def _explaining(original: Function) -> Function:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with explained_input_errors():
            return original(self, *args, **kwargs)

    return run


MULTI_WORKER = Repair(
    name="multi_worker",
    defect=(
        "fit, evaluate and predict fail under MultiWorkerMirroredStrategy, and under any strategy if the first batch "
        "splits unevenly: Keras averages the replicas' batches to learn their shape, and averages scalar logs along "
        "an axis that they do not have. Errors of the input do not say what to do."
    ),
    reference="keras#20585, keras#20329, ray#47464.",
    broken={
        f"{_MODULE}:reduce_per_replica": frozenset({"ecf2ff48d4d6dbb6"}),
        f"{_TRAINER}._maybe_symbolic_build": frozenset({"f8854e57c6c86238"}),
        f"{_TRAINER}.fit": frozenset({"c443656a13e238bb"}),
        f"{_TRAINER}.evaluate": frozenset({"9ad3bb843b4d8584", "162deb84e1b61c0d"}),
        f"{_TRAINER}.predict": frozenset({"994b523efcb655cd"}),
    },
    replace={
        f"{_MODULE}:reduce_per_replica": _reducing_scalars,
        f"{_TRAINER}._maybe_symbolic_build": _building_from_a_local_batch,
        f"{_TRAINER}.fit": _explaining,
        f"{_TRAINER}.evaluate": _explaining,
        f"{_TRAINER}.predict": _explaining,
    },
    probe=on_replicas("MULTI_WORKER", "uneven_first_batch", "trains"),
    without="Train in one process, or write your own training loop under the strategy.",
)


def _replicas(model: Any) -> int:
    return int(model.distribute_strategy.num_replicas_in_sync)


def _predicting_parts(original: Function) -> Function:
    def predict_on_batch(self: Any, x: Any) -> Any:
        strategy, replicas = self.distribute_strategy, _replicas(self)

        def divide(whole: Any) -> Any:
            whole = whole if isinstance(whole, tf.RaggedTensor) else tf.convert_to_tensor(whole)
            size = -(-whole.shape[0] // replicas)  # as fit divides a batch: the first replicas have more
            return strategy.experimental_distribute_values_from_function(
                lambda context: whole[size * context.replica_id_in_sync_group :][:size]
            )

        return original(self, x if replicas == 1 else keras.tree.map_structure(divide, x))

    return predict_on_batch


def _one_by_one(original: Function) -> Function:
    def _make_function(self: Any, step_function: Function) -> Function:
        if _replicas(self) == 1:
            return original(self, step_function)
        if self.jit_compile and not has_keras_own(self, "train_step"):
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
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
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
        self._loss_tracker.update_state(unscale_loss_for_distribution(loss), sample_weight=examples)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)

    return train_step


REPLICA_EXECUTIONS = Repair(
    name="replica_executions",
    defect=(
        "Under a tf.distribute strategy with several replicas, fit fails with steps_per_execution > 1 and with "
        "jit_compile=True, and predict_on_batch returns the whole batch once per replica."
    ),
    reference="Keras, TensorFlowTrainer._make_function; no upstream report was found.",
    broken={
        f"{_TRAINER}._make_function": frozenset({"703051878417df76"}),
        f"{_TRAINER}.predict_on_batch": frozenset({"eed9f0bff52de0fd"}),
        f"{_TRAINER}.train_step": frozenset({"f6ecb19499b554c4"}),
    },
    replace={
        f"{_TRAINER}._make_function": _one_by_one,
        f"{_TRAINER}.predict_on_batch": _predicting_parts,
        f"{_TRAINER}.train_step": _differentiating,
    },
    probe=on_replicas("REPLICA_EXECUTIONS", "executions", ["trains", 8]),
    without="Compile with jit_compile=False and steps_per_execution=1.",
)


def _through_own_file(original: Function) -> Function:
    def save(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        strategy: Any = getattr(model, "distribute_strategy", None)
        target = Path(filepath) if isinstance(filepath, (str, Path)) else Path()
        a_file = target.name.endswith((".keras", ".h5", ".hdf5")) and "://" not in str(filepath)
        if not a_file or not _spans_workers(strategy):
            return original(model, filepath, *args, **kwargs)
        resolver = strategy.cluster_resolver
        own = target.with_name(f".{resolver.task_type}{resolver.task_id}-{target.name}")
        try:
            original(model, str(own), *args, **kwargs)
            os.replace(own, target)  # all workers' files are alike, and a reader finds a whole one
        finally:
            own.unlink(missing_ok=True)

    return save


def _making(original: Function) -> Function:
    def makedirs(path: Any) -> None:
        try:
            original(path)
        except FileExistsError:
            if not Path(path).is_dir():  # else another worker was faster
                raise

    return makedirs


def _removing(original: Function) -> Function:
    def rmtree(path: Any) -> Any:
        while True:
            try:
                return original(path)
            except FileNotFoundError:  # another worker removes it too
                if not Path(path).exists():
                    return None

    return rmtree


def _after_all_have_saved(original: Function) -> Function:
    def on_train_end(self: Any, logs: Any = None) -> None:
        strategy = self.model.distribute_strategy
        if _spans_workers(strategy):  # all take part in a sum
            tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.constant(1.0)), axis=None))()
        original(self, logs)

    return on_train_end


SHARED_FILES = Repair(
    name="shared_files",
    defect=(
        "Workers that save a model to one path write into each other's file, which often cannot be read, and fail if "
        "two make or remove a callback's folder at once, or one removes BackupAndRestore's while another saves."
    ),
    reference="Keras, save_model in keras/src/saving/saving_lib.py; no upstream report was found.",
    broken={
        f"{_SAVING}:save_model": frozenset({"9e69ac53f5426cf6"}),
        f"{_SAVING}:save_weights_only": frozenset({"b6843e7292f03c0a", "32a5c68cfeeac14d"}),
        _HDF5: frozenset({"be7135d2264f06ff"}),
        f"{_FILES}:makedirs": frozenset({"e4d370237ffa4f77"}),
        f"{_BACKUP}.on_train_end": frozenset({"0a689ee55ae91bd7"}),
        f"{_FILES}:rmtree": frozenset({"bc46e98a7b6fb09c"}),
    },
    replace={
        f"{_SAVING}:save_model": _through_own_file,
        f"{_SAVING}:save_weights_only": _through_own_file,
        _HDF5: _through_own_file,
        f"{_FILES}:makedirs": _making,
        f"{_FILES}:rmtree": _removing,
        f"{_BACKUP}.on_train_end": _after_all_have_saved,
    },
    probe=in_workers("tfopt.repairs.catalogue:SHARED_FILES", "whole_files", [1.0, 1.0, 1.0]),
    without="Give each worker a path of its own with tfopt.distribute.own_path.",
)
