"""Checks the data of each `fit` in several processes: before the first step, and when an epoch has ended."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.distribute.cluster.together import all_or_none, exchange
from tfopt.distribute.data_check.reading import Reading, keep_first_batch, read, read_again
from tfopt.distribute.data_check.samples import digest
from tfopt.distribute.data_check.verdict import Verdict, judge_epoch, judge_generator, judge_start
from tfopt.errors import PipelineError
from tfopt.internals.training import GeneratorDataAdapter
from tfopt.repairs.probes import in_workers
from tfopt.repairs.repair import Function, Repair
from tfopt.warn import warn_once

_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
_COMPILED = "keras.src.trainers.trainer:Trainer._assert_compile_called"
_EPOCHS = "keras.src.backend.tensorflow.trainer:TFEpochIterator"
_ADAPTERS = "keras.src.trainers.data_adapters"
_GENERATOR = f"{_ADAPTERS}.generator_data_adapter:GeneratorDataAdapter"
_PY_DATASET = f"{_ADAPTERS}.py_dataset_adapter:PyDatasetAdapter"
_BEGINS_LATER = "_tfopt_begins_later"

_thread = threading.local()  # `model`: the one whose fit began last in this thread
_counters: "weakref.WeakKeyDictionary[Any, tf.Variable]" = weakref.WeakKeyDictionary()


def _spans_workers(strategy: Any) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def _places(strategy: Any) -> tuple[int, int]:
    """Returns how many workers there are, and how many replicas each has."""
    local = len(strategy.extended.worker_devices)
    return strategy.num_replicas_in_sync // local, local


class Check:
    """The check of one `fit`."""

    def __init__(self, model: Any, iterator: Any):
        self._model, self._iterator, self._strategy = model, iterator, model.distribute_strategy
        self._ran_out = False
        self._yielded = 0  # by a Python generator
        self._generator_ended = False
        self._counted = np.zeros(_places(self._strategy)[0], np.int64)  # by each worker, in all epochs
        if isinstance(iterator.data_adapter, GeneratorDataAdapter):
            self._count_generator(iterator.data_adapter)
        self._watch_first_batch(iterator)
        self._watch_epochs(iterator)

    def _watch_first_batch(self, iterator: Any) -> None:
        def _get_iterator() -> Iterator[Any]:
            del iterator._get_iterator  # Keras reads one batch to build the model, then begins again
            for batch in iterator._get_iterator():
                self._start(batch)
                yield batch

        iterator._get_iterator = _get_iterator

    def _start(self, batch: Any) -> None:
        """Compares the workers' data, given this worker's part of the first batch; all workers get here."""
        with all_or_none(self._strategy):
            reading = read(self._iterator)
            parts = self._of_replicas(batch)
            if not reading.divided:
                reading = replace(reading, first=digest(parts))
            reading = replace(reading, in_step=sum(map(_examples, parts)))
        self._readings = [Reading(**values) for values in exchange(self._strategy, reading.to_dict())]
        verdict = judge_start(self._readings)
        if verdict.unless_random and not all(exchange(self._strategy, read_again(self._iterator) == reading.sources)):
            return
        _report(verdict)

    def _of_replicas(self, batch: Any) -> list[Any]:
        def values(leaf: Any) -> Any:
            return [None] * replicas if leaf is None else self._strategy.experimental_local_results(leaf)

        replicas = _places(self._strategy)[1]
        leaves = [values(leaf) for leaf in keras.tree.flatten(batch)]
        return [keras.tree.pack_sequence_as(batch, part) for part in zip(*leaves, strict=True)]

    def _count_generator(self, adapter: Any) -> None:
        generate, first = adapter.generator, adapter._first_batches
        self._yielded = sum(_examples(batch) for batch in first)

        def counted() -> Iterator[Any]:
            for number, batch in enumerate(generate()):
                if number >= len(first):  # each iterator begins with the first ones
                    self._yielded += _examples(batch)
                yield batch
            self._generator_ended = True

        adapter.generator = counted

    def _watch_epochs(self, iterator: Any) -> None:
        catch, warn = iterator.catch_stop_iteration, iterator._interrupted_warning

        @contextmanager
        def catch_stop_iteration() -> Iterator[None]:
            self._ran_out = False
            counter = _counters.get(self._model)
            if counter is not None:  # an epoch that failed may have left some
                counter.assign(np.zeros_like(self._counted))
            begins_later = vars(self._iterator).pop(_BEGINS_LATER, False)
            with catch():
                yield
            if counter is not None and not begins_later:
                self._end_epoch(counter)

        def _interrupted_warning() -> None:
            self._ran_out = True
            warn()

        iterator.catch_stop_iteration, iterator._interrupted_warning = catch_stop_iteration, _interrupted_warning

    def _end_epoch(self, counter: tf.Variable) -> None:
        """Compares what the replicas have seen with what there is; all workers get here, or none."""
        counted = counter.read_value().numpy()  # summed over the workers, as Keras' metrics are next
        self._counted += counted
        if self._model.stop_training or not counted.any():  # a make_train_function of the model's own does not count
            return
        if self._ran_out and self._generator_ended:
            _report(judge_generator(self._yielded, self._counted.tolist()))
        elif self._readings[0].whole:
            _report(judge_epoch(self._readings, counted.tolist()))


def _examples(batch: Any) -> int:
    return next((int(leaf.shape[0]) for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", ())), 0)


def _report(verdict: Verdict) -> None:
    if verdict.text and verdict.refused:
        raise PipelineError(verdict.text)
    if verdict.text:
        warn_once(f"data check {verdict.text}", verdict.text)


def begin_later(epochs: Any) -> None:
    """Says that the next epoch of a `TFEpochIterator` begins after its first step: not all its examples are counted."""
    vars(epochs)[_BEGINS_LATER] = True


def _announcing(original: Function) -> Function:
    def _assert_compile_called(self: Any, method_name: str | None = None) -> None:
        original(self, method_name)
        if method_name == "fit":  # which calls this first; `fit` itself is what repairs replace
            _thread.model = weakref.ref(self)

    return _assert_compile_called


def _starting(original: Function) -> Function:
    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        model = getattr(_thread, "model", lambda: None)()
        # Those for validation, `evaluate` and `predict` have no class weights.
        if "class_weight" in kwargs and model is not None and _spans_workers(model.distribute_strategy):
            Check(model, self)

    return begin


def _counting(original: Function) -> Function:
    def make_train_function(self: Any, force: bool = False) -> Any:
        if not _spans_workers(self.distribute_strategy):
            return original(self, force)
        own = vars(self).get("train_step")
        # Not through Keras' attributes, which it would track and save.
        vars(self)["train_step"] = counting_step(self)
        try:
            return original(self, force)
        finally:
            vars(self).pop("train_step") if own is None else vars(self).update(train_step=own)

    return make_train_function


def counting_step(model: Any) -> Function:
    """Returns a model's `train_step`, which counts the examples of each worker if the check is installed."""
    strategy = model.distribute_strategy
    if not DATA_CHECK.installed or not _spans_workers(strategy):
        return model.train_step
    return _counted(model.train_step, _counter(model), _places(strategy))


def is_counter(variable: Any) -> bool:
    """Whether a variable only counts examples for the check; no training depends on it."""
    counters = [part for counter in _counters.values() for part in getattr(counter, "values", (counter,))]
    return any(variable is counter for counter in counters)


def _counter(model: Any) -> tf.Variable:
    """Returns the variable that holds how many examples each worker's replicas have seen."""
    if model not in _counters:
        with model.distribute_strategy.scope():
            _counters[model] = tf.Variable(
                tf.zeros(_places(model.distribute_strategy)[0], tf.int64),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
    return _counters[model]


def _counted(train_step: Function, counter: tf.Variable, places: tuple[int, int]) -> Function:
    def step(data: Any) -> Any:
        outputs = train_step(data)  # first, since TensorFlow seeds operations by how many came before
        batched = [leaf for leaf in keras.tree.flatten(data) if tf.is_tensor(leaf) and leaf.shape.rank != 0]
        if batched:
            number = tf.convert_to_tensor(tf.distribute.get_replica_context().replica_id_in_sync_group)
            examples = tf.cast(tf.shape(batched[0])[0], tf.int64)
            counter.assign_add(tf.one_hot(number // places[1], places[0], dtype=tf.int64) * examples)
        return outputs

    return step


def _remembering(original: Function) -> Function:
    def get_tf_dataset(self: Any) -> Any:
        standardize = self._standardize_batch

        def remember(batch: Any) -> Any:
            standard = standardize(batch)
            keep_first_batch(self, standard)
            return standard

        self._standardize_batch = remember  # while Keras reads batches to learn their shapes
        try:
            return original(self)
        finally:
            del self._standardize_batch

    return get_tf_dataset


DATA_CHECK = Repair(
    name="data_check",
    defect=(
        "In several processes, fit silently trains on part of the data, or on some examples twice, if the workers do "
        "not pass the same data, or TensorFlow does not divide it."
    ),
    reference="Keras, TensorFlowTrainer.fit; tf.distribute, experimental_distribute_dataset.",
    broken={
        f"{_TRAINER}.fit": frozenset({"c443656a13e238bb"}),
        _COMPILED: frozenset({"f8b15000a5e60f70", "d1520e3c1d38b0d5"}),
        f"{_TRAINER}.make_train_function": frozenset({"07690b1868e9d6df"}),
        f"{_TRAINER}._maybe_symbolic_build": frozenset({"f8854e57c6c86238"}),
        f"{_EPOCHS}.__init__": frozenset({"794703988bd2156e"}),
        f"{_EPOCHS}.catch_stop_iteration": frozenset({"6f7e30dd3e1b55f7"}),
        f"{_GENERATOR}.get_tf_dataset": frozenset({"9c0c7f2f41ce7ddd"}),
        f"{_PY_DATASET}.get_tf_dataset": frozenset({"3da51bbd1fd7aa29"}),
    },
    # None of these is replaced by a repair that training on several replicas needs: those can still be removed.
    replace={
        _COMPILED: _announcing,
        f"{_TRAINER}.make_train_function": _counting,
        f"{_EPOCHS}.__init__": _starting,
        f"{_PY_DATASET}.get_tf_dataset": _remembering,
    },
    probe=in_workers(f"{__name__}:DATA_CHECK", "other_data", ["raises"], refuses=True),
    without="Pass check_data=False to tfopt.distribute.strategy().",
)
"""Installed by `tfopt.distribute.strategy()` for several processes."""
