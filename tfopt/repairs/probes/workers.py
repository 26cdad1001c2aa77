"""Trainings in two processes, each with a `TF_CONFIG`, in one folder. Both compute the same numbers."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.internals.probe_process import outcomes
from tfopt.repairs.probes.one_device import numbers


@functools.cache  # a process makes only one
def two_workers() -> tf.distribute.Strategy:
    """The strategy of both processes."""
    return tf.distribute.MultiWorkerMirroredStrategy()


def _worker() -> int:
    return int(two_workers().cluster_resolver.task_id)


def _sum(value: float = 0.0) -> float:
    """The sum of both workers' values. Each waits for the other."""
    strategy: Any = two_workers()
    return float(tf.function(lambda: strategy.reduce("SUM", strategy.run(lambda: tf.constant(value)), axis=None))())


class Halting(keras.layers.Dense):
    """Does something when half of it is saved."""

    do: Callable[[], object] | None = None

    def _halt(self) -> None:
        do, self.do = self.do, None
        if do is not None:
            do()

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments of a dense layer."""
        self._halt()
        return super().get_config()

    def save_own_variables(self, store: Any) -> None:
        """Saves the weights."""
        self._halt()
        super().save_own_variables(store)


def _model() -> Any:
    """A model that takes 4 numbers and gives 2."""
    keras.utils.set_random_seed(1)
    with two_workers().scope():
        model = keras.Sequential([keras.Input((4,)), Halting(8, activation="relu"), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], jit_compile=False)
    return model


def _examples(count: int) -> Any:
    return np.random.default_rng(0).normal(size=(count, 4)).astype("float32")


def fitted() -> list[float]:
    """Weights, metrics and losses of a training that saves into paths of each worker, and of one on a PyDataset."""

    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            inputs = _examples(32)[8 * index :][:8]
            return inputs, inputs[:, :2]

    model, inputs, own = _model(), _examples(32), f"own{_worker()}"
    data = tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :2])).batch(8)
    callbacks = [
        keras.callbacks.ModelCheckpoint(f"{own}/{{epoch}}.weights.h5", save_weights_only=True),
        keras.callbacks.ModelCheckpoint(f"{own}.keras"),
        keras.callbacks.BackupAndRestore(f"{own}-backup"),
    ]
    model.fit(data, shuffle=False, verbose=0, callbacks=callbacks)
    model.load_weights(f"{own}/1.weights.h5")
    model.fit(Batches(), shuffle=False, verbose=0)
    return numbers(model)


def whole_files() -> list[float]:
    """How many models, weights and old models the first worker reads while the second one saves to the same path."""
    model = _model()
    return [
        _read(model, "model.keras", keras.models.save_model, _loaded),
        _read(model, "model.weights.h5", keras.Model.save_weights, functools.partial(_filled, model)),
        _read(model, "model.h5", keras.models.save_model, _loaded),
    ]


def _loaded(path: str) -> Any:
    return keras.models.load_model(path, custom_objects={"Halting": Halting}, compile=False)


def _filled(model: Any, path: str) -> Any:
    copy = keras.models.clone_model(model)
    copy.load_weights(path)
    return copy


def _read(model: Any, path: str, save: Callable[..., Any], load: Callable[[str], Any]) -> float:
    found = 0.0
    if _worker() == 0:
        save(model, path)
        _sum()
        _sum()
        with contextlib.suppress(Exception):  # whatever Keras raises
            found = float(all(map(np.array_equal, load(path).get_weights(), model.get_weights())))
        _sum()
    else:
        _sum()
        model.layers[0].do = lambda: (_sum(), _sum())
        save(model, path)
    return _sum(found)


def other_data() -> list[Any]:
    """What `fit` makes of other data in each worker."""

    def fitted() -> str:
        inputs = _examples(32) + _worker()
        try:
            _model().fit(tf.data.Dataset.from_tensor_slices((inputs, inputs[:, :2])).batch(8), verbose=0)
        except ValueError:
            return "raises"
        return "trains"

    return outcomes(fitted)
