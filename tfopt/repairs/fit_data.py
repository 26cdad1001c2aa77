"""Defects of what `fit` does with its data and counts as a step, and what it says of data that it cannot read.

- `numpy_slices`: training overwrites labels in the NumPy array of which a generator yields slices.
- D19, `extra_step`: a part of a step runs when data of unknown length has ended.
- D16, `failed_steps`: a step that ran out of memory is counted.
- D20, `shuffle_warning`: `fit` warns of a shuffle that nobody asked for.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, summarize_error
from tfopt.repairs.gradient_graph import depends_on
from tfopt.repairs.probes import equal, on_one_device, on_replicas
from tfopt.repairs.repair import Function, Repair

_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_ADAPTERS = "keras.src.trainers.data_adapters"
_GENERATOR = f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter"
_PY_DATASET = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"


def _copied(batch: Any) -> Any:
    return keras.tree.map_structure(lambda part: part.copy() if isinstance(part, np.ndarray) else part, batch)


def _reading_copies(original: Function) -> Function:
    def begin(self: Any, generator: Iterable[Any]) -> None:
        def copies() -> Iterator[Any]:
            for batch in generator:
                yield _copied(batch)

        original(self, copies())

    return begin


def _copying(original: Function) -> Function:
    def _standardize_batch(self: Any, batch: Any) -> Any:
        return _copied(original(self, batch))

    return _standardize_batch


NUMPY_SLICES = Repair(
    name="numpy_slices",
    defect=(
        "With several replicas on CPUs, fit overwrites the labels in a NumPy array of which a generator or PyDataset "
        "yields slices: tf.data uses memory aligned to 64 bytes without a copy, and a step writes into it."
    ),
    reference="TensorFlow, FuncRegistry._convert in tensorflow/python/ops/script_ops.py; no upstream report was found.",
    broken={
        f"{_GENERATOR}.__init__": frozenset({"1c6fac6d1a8ed0e7", "cb5de3c46eb433a9"}),
        f"{_GENERATOR}.get_tf_dataset": frozenset({"9c0c7f2f41ce7ddd"}),
        f"{_PY_DATASET}._standardize_batch": frozenset({"c67198090908f620"}),
        f"{_PY_DATASET}.get_tf_dataset": frozenset({"3da51bbd1fd7aa29"}),
    },
    replace={f"{_GENERATOR}.__init__": _reading_copies, f"{_PY_DATASET}._standardize_batch": _copying},
    probe=on_replicas("NUMPY_SLICES", "overwritten", [0.0, 0.0]),
    without="Yield copies of the slices.",
)


def _after_the_batch(original: Function) -> Function:
    def _make_function(self: Any, step_function: Function) -> Function:
        def step(data: Any) -> Any:
            batch = list(filter(tf.is_tensor, tf.nest.flatten(data, expand_composites=True)))
            with tf.variable_creator_scope(_before_any_batch), tf.control_dependencies(batch):
                return step_function(data)

        return original(self, step)

    return _make_function


def _before_any_batch(create: Function, **options: Any) -> tf.Variable:
    with tf.control_dependencies(None):  # XLA needs initial values that depend on no batch
        return create(**options)


EXTRA_STEP = Repair(
    name="extra_step",
    defect=(
        "When data of unknown length ends, what does not depend on the batch runs once more: the optimizer counts a "
        "step too many in each epoch, which shifts schedules and Adam's bias correction, and random layers skip a draw."
    ),
    reference="Keras, TensorFlowTrainer._make_function; no upstream report was found.",
    broken={f"{_TRAINER}._make_function": frozenset({"703051878417df76"})},
    replace={f"{_TRAINER}._make_function": _after_the_batch},
    probe=on_one_device("EXTRA_STEP", "unknown_length", 18),
    without="Give the dataset its length with tf.data.experimental.assert_cardinality.",
)


def _counting_last(original: Function) -> Function:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        graph = tf.compat.v1.get_default_graph()
        before = 0 if tf.executing_eagerly() else len(graph.get_operations())
        original(self, grads, trainable_variables)
        if tf.executing_eagerly():
            return
        made = graph.get_operations()[before:]
        for place, operation in enumerate(made):
            if operation.type.startswith("Assign") and depends_on([operation.inputs[0]], self._iterations.value):
                # Only those made before it, as no operation waits for one made later.
                operation._add_control_inputs([other for other in made[:place] if other._is_stateful])

    return apply


FAILED_STEPS = Repair(
    name="failed_steps",
    defect=(
        "A step that fails, such as for want of memory, is counted by the optimizer, since the count waits for no "
        "gradient. After a caught error, schedules and Adam's bias correction are a step ahead."
    ),
    reference="Keras, BaseOptimizer.apply; no upstream report was found.",
    broken={"keras.src.optimizers.base_optimizer:BaseOptimizer.apply": frozenset({"4634947582aff41e"})},
    replace={"keras.src.optimizers.base_optimizer:BaseOptimizer.apply": _counting_last},
    probe=on_one_device("FAILED_STEPS", "failed_steps", 1),
    without="After the error, restore a checkpoint, or assign optimizer.iterations what it was before the step.",
)


_ORDER_DECIDED = "_tfopt_order_decided"  # an attribute of datasets
_BEGIN = "keras.src.trainers.epoch_iterator:EpochIterator.__init__"
_SPLIT = f"{_ADAPTERS}.array_slicing:train_validation_split"


def mark_order_decided(dataset: Any) -> Any:
    """Returns a dataset marked as one whose order was decided when it was made: `fit` no longer warns of its shuffle.

    Installs the repair, unless it would have to be tried first: a warning less is not worth the seconds.
    """
    if SHUFFLE_WARNING.standing() in ("known", "tried"):
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


def _naming_split(original: Function) -> Function:
    def train_validation_split(arrays: Any, validation_split: float) -> Any:
        if any(getattr(part, _ORDER_DECIDED, False) for part in arrays):
            raise ValueError(
                "Expected no validation_split in `fit` with a pipeline, which Keras cannot divide. Found: "
                f"validation_split={validation_split}. What to do: build both parts, build_pipeline(source, "
                f"split={validation_split}) to train on and build_pipeline(source, split={validation_split}, "
                "training=False) for validation_data."
            )
        return original(arrays, validation_split)

    return train_validation_split


SHUFFLE_WARNING = Repair(
    name="shuffle_warning",
    defect=(
        "fit warns that `shuffle=True` was passed for every tf.data.Dataset, though it is "
        "only the default and the dataset may be shuffled, and refuses validation_split without naming another way."
    ),
    reference="Keras, get_data_adapter in keras/src/trainers/data_adapters; no upstream report was found.",
    broken={_BEGIN: frozenset({"0c220ae28381002f"}), _SPLIT: frozenset({"6aee314f90ac6b4a"})},
    replace={_BEGIN: _without_a_shuffle, _SPLIT: _naming_split},
    probe=equal("tfopt.repairs.catalogue:SHUFFLE_WARNING"),
    without="Pass shuffle=False to fit.",
)


# Not those that TensorFlow raises when another worker is lost, nor the one with which data end.
_WRONG_INPUT = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnknownError,  # raised by a Python function
)
_INPUT = re.compile(r"\{\{node \w*IteratorGetNext|Error in user-defined function passed to \w*Dataset")
_WHERE = re.compile(r"\[*\{\{\w+ [^}]*\}\}\]*|\[\[\w*\]\]|\[Op:\w*\]( name:)?|<stack traces unavailable>")


@contextmanager
def explained_input_errors() -> Iterator[None]:
    """Raises a PipelineError that says what to do in place of TensorFlow's error for data that cannot be read."""
    try:
        yield
    except _WRONG_INPUT as error:
        text = str(error)
        if "FILE based sharding" in text or "unshardable source" in text:
            few = re.search(r"only has (\d+) file.* required (\d+)", text)
            found = f"files: {few[1]}, workers: {few[2]}" if few else "data that are not read from files"
            raise PipelineError(
                f"Expected a file for each worker, under AutoShardPolicy.FILE. Found: {found}. What to do: use "
                "AutoShardPolicy.DATA, with which each worker takes its part of the examples, or let build_pipeline "
                "divide the data."
            ) from error
        if not _INPUT.search(text) or "tf.data service" in text:  # the model's, or one that says what to do already
            raise
        found = summarize_error(ValueError(_WHERE.sub("", text)))
        raise PipelineError(
            f"Expected data that can be read to the end of the epoch. Found: {type(error).__name__}: {found}. What to "
            "do: correct the data or the function that makes them; verify_records and verify_images of "
            "tfopt.pipelines find damaged files."
        ) from error
