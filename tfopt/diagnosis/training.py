"""The training in question: what `fit` is given, as the experiments feed it, and put back afterwards as it was."""

import copy
import inspect
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.internals.runtime import random_generator
from tfopt.internals.training import get_data_adapter, train_validation_split
from tfopt.model.batches import batch_size, first_batch
from tfopt.model.layers import require_compiled
from tfopt.model.state import STEP_FUNCTIONS, StatePreserver, trace_train_step
from tfopt.pipelines.plan import PipelinePlan

# Attributes of Keras' and tfopt's callbacks that say where they write.
_PATHS = ("path", "dir", "file", "folder", "filename")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Training:
    """A model, and what its `fit` is given."""

    model: keras.Model
    dataset: tf.data.Dataset
    """What `fit` iterates in an epoch: the dataset, or what Keras makes of arrays, a PyDataset or generator."""
    data: Any
    """The data as they were given."""
    arrays: tuple[Any, Any, Any]
    """Inputs, targets and sample weights, as `fit` is given them, without what it validates on."""
    shuffled: bool
    """Whether `fit` shuffles arrays."""
    batch: Any
    """A first batch, as the training step takes it."""
    resident: tf.data.Dataset
    """That batch again and again."""
    examples: int
    """Examples in that batch."""
    callbacks: tuple[keras.callbacks.Callback, ...]
    validation: Mapping[str, Any] | None
    """Arguments of `evaluate`; None without validation."""
    validation_split: float
    """As for `fit`."""
    steps_per_epoch: int | None
    """Steps of an epoch; None if unknown."""
    steps_given: int | None
    """`steps_per_epoch` as it was given."""
    opened_each_epoch: bool
    """Whether `fit` starts over with the data in each epoch; with `steps_per_epoch` it continues where it stopped."""
    epochs: int
    epochs_per_validation: int
    graph: Any
    """The traced step."""

    @classmethod
    def of(cls, model: keras.Model, arguments: Mapping[str, Any]) -> "Training":
        """Returns the training that `model.fit(**arguments)` would run.

        Reads the first batch (Keras itself reads up to three of a PyDataset or generator, to learn their shapes).

        Raises:
            TypeError: If `model` is not a Keras model, or the data are nothing that `fit` takes.
            ValueError: If the model is not compiled, or the data are no batches, or lack the targets that it needs.
            tfopt.errors.PipelineError: If the data are empty.
            tfopt.errors.UnsupportedError: If the model runs eagerly and its step cannot be traced.
        """
        require_compiled(model)
        given = inspect.signature(keras.Model.fit).bind(model, **arguments)
        given.apply_defaults()
        asked = given.arguments
        callbacks = _as_tuple(asked["callbacks"])
        data, plan = asked["x"], isinstance(asked["x"], PipelinePlan)
        x, y, weights = (data.build() if plan else data), asked["y"], asked["sample_weight"]
        validation = asked["validation_data"]
        if asked["validation_split"] and validation is None:
            (x, y, weights), validation = train_validation_split(
                (x, y, weights), validation_split=asked["validation_split"]
            )
        dataset, batches = _as_fit_iterates(x, y, weights, asked)
        batch = first_batch(model, dataset)
        with tf.device("CPU:0"):  # eager constants go to the GPU where there is one
            one = batch if model._distribute_strategy is None else next(iter(dataset))
            resident = tf.data.Dataset.from_tensors(one).repeat()
        try:
            _, graph = trace_train_step(model, batch)
        except (ValueError, TypeError) as error:
            if reason := _mistake(model, batch):
                raise ValueError(reason) from error
            raise
        return cls(
            model=model,
            dataset=dataset,
            data=data,
            arrays=(x, y, weights),
            shuffled=bool(asked["shuffle"]),
            batch=batch,
            resident=resident,
            examples=batch_size(model, batch),
            callbacks=(*callbacks, *([_progress_bar()] if asked["verbose"] in ("auto", 1) else [])),
            validation=None if validation is None else _evaluation(validation, asked),
            validation_split=asked["validation_split"],
            steps_per_epoch=asked["steps_per_epoch"] or batches,
            steps_given=asked["steps_per_epoch"],
            opened_each_epoch=asked["steps_per_epoch"] is None,
            epochs=max(1, asked["epochs"] - asked["initial_epoch"]),
            epochs_per_validation=asked["validation_freq"] if isinstance(asked["validation_freq"], int) else 1,
            graph=graph,
        )

    def twice(self) -> tf.data.Dataset:
        """The resident batch, twice as large."""
        spec = self.resident.element_spec
        return self.resident.map(
            lambda *parts: tf.nest.pack_sequence_as(spec, [tf.concat([x, x], 0) for x in tf.nest.flatten(parts)])
        )

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Gives everything back as it was at the beginning of the block: model, optimizer, callbacks, random states."""
        model = self.model
        kept = {name: model.__dict__.get(name) for name in STEP_FUNCTIONS}
        # Before a script sets a seed, TensorFlow has no generator.
        jit, generator = model.jit_compile, random_generator()
        states = random.getstate(), np.random.get_state(), generator and generator.getstate()
        with ExitStack() as stack:
            stack.enter_context(StatePreserver(model, also=self.graph.variables).preserved())
            stack.enter_context(_kept(self.callbacks))
            try:
                yield
            finally:
                model.jit_compile = jit
                for name, function in kept.items():
                    setattr(model, name, function)
                random.setstate(states[0])
                np.random.set_state(states[1])
                if generator is not None and states[2] is not None:
                    generator.setstate(states[2])


def _mistake(model: keras.Model, batch: Any) -> str:
    """What is wrong with data on which the step cannot be traced; empty if that does not show."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    given = [tuple(part.shape) for part in tf.nest.flatten(parts[0]) if hasattr(part, "shape")]
    wanted = [tuple(part.shape) for part in (getattr(model, "inputs", None) or ()) if part.shape is not None]
    if given and wanted and len(given[0]) == len(wanted[0]) - 1:
        return f"Expected batches of the shape {wanted[0]}. Found {given[0]}, an example alone. Call dataset.batch(32)."
    if len(parts) == 1 and type(model).train_step is keras.Model.train_step:
        return "Expected inputs and targets. Found inputs alone. Pass arrays as one argument, (x, y)."
    return ""


def _progress_bar() -> keras.callbacks.ProgbarLogger:
    """The progress bar that `fit` shows, as a callback that is there whatever `verbose` says."""
    bar = keras.callbacks.ProgbarLogger()
    # Not a subclass: tfopt.fit.overlap knows Keras' own class.
    bar.set_params = lambda params: keras.callbacks.ProgbarLogger.set_params(bar, params | {"verbose": 1})
    return bar


def _as_fit_iterates(x: Any, y: Any, weights: Any, asked: Mapping[str, Any]) -> tuple[tf.data.Dataset, int | None]:
    """The dataset that `fit` iterates, and how many batches it has, None if unknown."""
    if isinstance(x, tf.data.Dataset) and not asked["class_weight"]:
        batches = int(x.cardinality())
        return x, batches if batches > 0 else None
    make = partial(
        get_data_adapter,
        x=x,
        y=y,
        sample_weight=weights,
        batch_size=asked["batch_size"],
        steps_per_epoch=asked["steps_per_epoch"],
        shuffle=asked["shuffle"]
        and isinstance(x, np.ndarray | tf.Tensor | list | tuple | dict | keras.utils.PyDataset),
        class_weight=asked["class_weight"],
    )
    try:
        adapter = make()
    except ValueError as error:
        if "empty" in str(error) or "at least one batch" in str(error):
            raise PipelineError(f"Expected data of at least one batch. Found: {error} Check the source.") from error
        raise TypeError(
            "Expected data that model.fit takes: a tf.data.Dataset, arrays, a PyDataset, a generator, or a plan of "
            f"tfopt.pipelines. Received: {type(x).__name__}. {error}"
        ) from error
    dataset = adapter.get_tf_dataset()
    if isinstance(x, keras.utils.PyDataset):
        dataset = _in_passes(make, dataset)
    return dataset, adapter.num_batches


def _in_passes(make: Callable[[], Any], dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Keras' dataset of a PyDataset, with an adapter for each pass: workers of one that was cut short would hang."""

    def one_pass() -> Iterator[Any]:
        adapter = make()
        adapter.on_epoch_begin()
        try:
            yield from adapter._get_iterator()
        finally:
            adapter.on_epoch_end()

    passes = tf.data.Dataset.from_generator(one_pass, output_signature=dataset.element_spec)
    return passes.with_options(dataset.options()) if make().enqueuer else passes.prefetch(tf.data.AUTOTUNE)


def _evaluation(validation: Any, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(validation)
    size = asked["validation_batch_size"] or asked["batch_size"]
    return {"x": x, "y": y, "sample_weight": weights, "batch_size": size, "steps": asked["validation_steps"]}


def evaluation_batches(given: Mapping[str, Any]) -> int | None:
    """How many batches `evaluate` takes with these arguments; None if unknown."""
    if given["steps"] is not None:
        return int(given["steps"])
    asked = {"class_weight": None, "steps_per_epoch": None, "shuffle": False, "batch_size": given["batch_size"]}
    return _as_fit_iterates(given["x"], given["y"], given["sample_weight"], asked)[1]


def _as_tuple(callbacks: Any) -> tuple[keras.callbacks.Callback, ...]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UnsupportedError(
            "Expected callbacks as a list. Found a keras.callbacks.CallbackList, from which none can be taken away. "
            "Pass the callbacks themselves."
        )
    flat = [] if callbacks is None else callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for one in flat:
        if not isinstance(one, keras.callbacks.Callback):
            name, kind = getattr(one, "__name__", type(one).__name__), isinstance(one, type)
            what = f"the class {name}. Create one: {name}(...)" if kind else f"{name}"
            hint = "" if kind else ". Arrays are one argument: (x, y)" * isinstance(one, np.ndarray | tf.Tensor)
            raise TypeError(f"Expected callbacks as a list of keras.callbacks.Callback. Received: {what}{hint}.")
    return tuple(flat)


@contextmanager
def _kept(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Gives callbacks' attributes back after a block."""
    before = [(callback, _copied(callback)) for callback in callbacks]
    try:
        yield
    finally:
        for callback, attributes in before:
            vars(callback).clear()
            vars(callback).update(attributes)


def _copied(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """A callback's attributes; lists, counters and the like are copies, since its hooks change them in place."""
    found = dict(vars(callback))
    for name, value in found.items():
        if isinstance(value, list | dict | set | np.ndarray):
            with suppress(Exception):  # what cannot be copied is shared
                found[name] = copy.deepcopy(value)
    return found


@contextmanager
def writing_elsewhere(callbacks: Sequence[keras.callbacks.Callback]) -> Iterator[None]:
    """Lets Keras' and tfopt's callbacks, and subclasses of them, write into a temporary folder in a block.

    A folder for each `fit`: one that restores a training would go on with that of the last experiment.
    """
    paths = [
        (callback, name, vars(callback)[name])
        for callback in callbacks
        for name in sorted(_path_names(type(callback)) & vars(callback).keys())
        if isinstance(vars(callback)[name], str | Path) and vars(callback)[name]
    ]
    with tempfile.TemporaryDirectory(prefix="tfopt-", ignore_cleanup_errors=True) as folder:
        try:
            for callback, name, value in paths:
                own = Path(folder) / str(callbacks.index(callback))
                own.mkdir(exist_ok=True)
                vars(callback)[name] = type(value)(own / Path(value).name)
            yield
        finally:
            for callback, name, value in paths:
                vars(callback)[name] = value


def _path_names(kind: type[keras.callbacks.Callback]) -> frozenset[str]:
    """The attributes that hold paths in Keras' and tfopt's callbacks among a class and its bases."""
    known = [one for one in kind.__mro__ if one.__module__.startswith(("keras.", "tfopt."))]
    methods = [method for one in known for method in vars(one).values() if hasattr(method, "__code__")]
    names = {name for method in methods for name in method.__code__.co_names}
    return frozenset(name for name in names if name.lower().endswith(_PATHS))


@contextmanager
def hooks_replaced(
    callbacks: Iterable[keras.callbacks.Callback], names: Sequence[str], make: Callable[[Any, str], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces hooks of callbacks for a block by what `make` returns for a callback and the hook's name."""
    own = [
        (callback, {name: vars(callback)[name] for name in names if name in vars(callback)}) for callback in callbacks
    ]
    try:
        for callback, _ in own:
            vars(callback).update({name: make(callback, name) for name in names})
        yield
    finally:
        for callback, before in own:
            for name in names:
                vars(callback).pop(name, None)
            vars(callback).update(before)


def without_epoch_ends(callbacks: Iterable[keras.callbacks.Callback]) -> AbstractContextManager[None]:
    """Lets callbacks do nothing at the end of an epoch, which comes after every few steps of an experiment."""
    return hooks_replaced(callbacks, ["on_epoch_end"], lambda callback, name: lambda epoch, logs=None: None)
