"""Trains in rounds of local steps, and writes the outcomes.

    python local_training.py FOLDER here|workers|truth few|rest

Of the few, it also counts, interrupts and resumes.
"""

import contextlib
import pickle
import sys
import tempfile
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute, fit

MANY = 192


def outcome(case, strategy):
    """Trains a case: weights, how far the replicas are apart, and what the optimizer and the history say."""
    import keras

    from tfopt.callbacks import LocalSteps

    keras.config.set_floatx("float64" if case.dtype == "float64" else "float32")
    with strategy.scope():
        model = case.model()
    if case.overlapped:
        fit.overlap(model)
    seen = looking(strategy)
    callbacks = [seen, LocalSteps(case.every, outer=case.outer and case.outer())]
    history = model.fit(case.dataset(), epochs=case.epochs, verbose=0, callbacks=callbacks).history
    optimizer = model.optimizer
    scale = getattr(optimizer, "dynamic_scale", None)
    return {
        "weights": model.get_weights(),
        "apart": apart([*model.weights, *optimizer.variables], strategy),
        "apart at epoch's ends": seen.apart,
        "iterations": int(optimizer.iterations.numpy()),
        "scale": None if scale is None else float(scale.value.numpy()),
        "loss": history["loss"],
        "stock again": type(model.train_function).__name__ != "LocalFunction" and "save" not in vars(model),
    }


def apart(variables, strategy):
    """The largest difference between this process's replicas, over all variables."""
    import numpy as np

    found = 0.0
    for variable in variables:
        parts = [part.numpy() for part in strategy.experimental_local_results(variable.value)]
        found = max(found, *(float(np.abs(part - parts[0]).max()) for part in parts))
    return found


def looking(strategy):
    """A callback that looks at the replicas at the end of each epoch, before the callbacks behind it."""
    import keras

    class Looking(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.apart = []

        def on_epoch_end(self, epoch, logs=None):
            self.apart.append(apart([*self.model.weights, *self.model.optimizer.variables], strategy))

    return Looking()


def collectives(function):
    """The collective operations in the graphs of a traced function."""
    traced = function if hasattr(function, "get_concrete_function") else function.__wrapped__
    found = 0
    for concrete in traced._list_all_concrete_functions():
        graph = concrete.graph.as_graph_def()
        nodes = [*graph.node, *(node for inside in graph.library.function for node in inside.node_def)]
        found += sum(node.op.startswith("Collective") for node in nodes)
    return found


def counted(strategy):
    """Trains 192 steps: how often replicas synchronised, and the collective operations in the graphs that ran."""
    import inspect

    import keras
    import numpy as np

    from tfopt.callbacks import LocalSteps

    keras.config.set_floatx("float32")
    local = LocalSteps(8)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse", jit_compile=False)
    x = np.ones((8, 4), "float32")
    data = tf.data.Dataset.from_tensors((x, x[:, :1])).repeat()  # of finite ones, workers announce each batch
    model.fit(data, steps_per_epoch=1, verbose=0, shuffle=False)
    stock = inspect.getclosurevars(model.train_function).nonlocals["multi_step_on_iterator"]
    model.fit(data, steps_per_epoch=MANY, verbose=0, shuffle=False, callbacks=[local])
    averaging = local._function._averaging
    return {
        "synchronous step": collectives(stock),
        "local step": collectives(local._function._one_step),
        "synchronizations": local.synchronizations,
        "iterations": int(model.optimizer.iterations.numpy()),
        "end of a round": [collectives(function) for function in list(averaging._run.values())[:2]],
    }


def interrupted(case, strategy):
    """An error ends a fit within a round; the next one is synchronous. Spread of the replicas: then, saved, after."""
    import keras

    from tfopt.callbacks import LocalSteps

    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise InterruptedError

    keras.config.set_floatx("float64")
    with strategy.scope():
        model = case.model()
    with contextlib.suppress(InterruptedError):
        model.fit(case.dataset(), verbose=0, callbacks=[LocalSteps(case.every), Failing()])
    everything = [*model.weights, *model.optimizer.variables]
    within = apart(everything, strategy)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(Path(folder, "model.weights.h5"))
    saved = apart(everything, strategy)
    model.fit(case.dataset(), verbose=0)
    return {
        "within": within,
        "saved": saved,
        "after": apart(everything, strategy),
        "function": type(model.train_function).__name__,
    }


def resumed(case, strategy, folder, rank):
    """Saves within the first of two epochs and after it, and trains the second from the file."""
    import keras

    from tfopt.callbacks import LocalSteps

    class Saving(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                found["before"] = apart(self.model.weights, strategy)
                self.model.save_weights(path)
                found["at"] = apart([*self.model.weights, *self.model.optimizer.variables], strategy)

    found, path = {}, folder / f"{rank}.weights.h5"
    keras.config.set_floatx("float64")
    for name in ("whole", "resumed"):
        with strategy.scope():
            model = case.model()
            model.optimizer.build(model.trainable_variables)
            if name == "resumed":
                model.load_weights(path)
        if name == "whole":
            model.fit(case.dataset(), verbose=0, callbacks=[LocalSteps(case.every), Saving()])
            model.save_weights(path)
        model.fit(case.dataset(), verbose=0, callbacks=[LocalSteps(case.every)])
        found[name] = model.get_weights()
    return found


def main():
    """Trains all of it."""
    folder, where, share = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if where == "here":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto") if where != "truth" else None
    import local_cases

    rank = distribute.resolve().index if where == "workers" else ""
    found = {}
    for name in local_cases.in_share(share, where):
        case = local_cases.CASES[name]
        try:
            if strategy:
                found[name] = outcome(case, strategy)
            else:
                found[name] = local_cases.separately(case)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if strategy and share == "few":
        found["counted"] = counted(strategy)
        found["interrupted"] = interrupted(local_cases.CASES["momentum, uneven tail"], strategy)
        found["resumed"] = resumed(local_cases.CASES["momentum, uneven tail"], strategy, folder, rank)
    (folder / f"{where}{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
