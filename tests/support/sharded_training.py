"""Trains with plain and with sharded optimizers, and writes the outcomes.

    python sharded_training.py FOLDER DEVICES few|rest

DEVICES is 0 in the processes of a cluster. With 3, it only goes on from the files that the others saved with few cases.
"""

import pickle
import sys
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute
from tfopt.hardware.host_activity import sent_bytes


def outcome(case, strategy, shard):
    """The weights and the state after a training, with or without sharding."""
    import keras

    keras.config.set_floatx(case.dtype if case.dtype == "float64" else "float32")
    make = case.optimizer
    plain = getattr(case, "plain", make)
    case.optimizer = lambda: distribute.shard_optimizer(make()) if shard else plain()
    with strategy.scope():
        model = case.model()
    case.optimizer = make
    model.fit(case.dataset(), epochs=1, verbose=0)
    model.fit(case.dataset(), epochs=1, verbose=0)  # a second fit goes on
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    found = {
        "weights": model.get_weights(),
        "state": [variable.numpy() for variable in model.optimizer.variables],
        "scale": scale is not None and float(scale.value.numpy()),
        "local": [variable.value.shape.num_elements() * variable.value.dtype.size for variable in optimizer.variables],
    }
    if shard:
        found["sharding"] = optimizer.sharding.to_dict()
    return found


def saved(folder, strategy, rank):
    """Saves after one epoch, then trains another."""
    from sharded_cases import SAVED

    with strategy.scope():
        model = SAVED(distribute.shard_optimizer)
    model.fit(SAVED.dataset(), epochs=1, verbose=0)
    model.save_weights(folder / f"{rank}.weights.h5")
    model.save(folder / f"{rank}.keras")
    model.fit(SAVED.dataset(), epochs=1, verbose=0)
    return {"weights": model.get_weights(), "state": [variable.numpy() for variable in model.optimizer.variables]}


def loaded(path, strategy):
    """Goes on from a file."""
    from sharded_cases import SAVED

    with strategy.scope():
        model = SAVED(distribute.shard_optimizer)
        model.optimizer.build(model.trainable_variables)
        model.load_weights(path)
    state = [variable.numpy() for variable in model.optimizer.variables]
    model.fit(SAVED.dataset(), epochs=1, verbose=0)
    return {"loaded": state, "weights": model.get_weights()}


def sent(strategy):
    """Bytes that this process sends per step, beside what the optimizer says, with and without sharding."""
    import keras
    import numpy as np

    found = {}
    for shard in (False, True):
        with strategy.scope():
            model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512), keras.layers.Dense(512)])
            optimizer = keras.optimizers.Adam()
            model.compile(distribute.shard_optimizer(optimizer) if shard else optimizer, "mse", jit_compile=False)
        x = np.ones((8, 512), "float32")
        data = tf.data.Dataset.from_tensors((x, x)).repeat(40)
        model.fit(data.take(4), verbose=0)
        before = sent_bytes()
        model.fit(data, verbose=0)
        found[shard] = None if before is None else (sent_bytes() - before) / 40
    return found | {"said": optimizer.sharding.to_dict()}


def main():
    """Trains all of it."""
    folder, devices, share = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if devices:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    strategy = distribute.strategy("auto")
    from sharded_cases import in_share

    rank = f"worker{distribute.resolve().index}" if not devices else "here"
    if devices == 3:
        found = {path.name: loaded(path, strategy) for path in sorted(folder.glob("*.h5"))}
        (folder / "three.pickle").write_bytes(pickle.dumps(found))
        return
    found = {}
    for name, case in in_share(share, "here" if devices else "worker").items():
        try:
            found[name] = [outcome(case, strategy, shard) for shard in (False, True)]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    if share == "few":
        found["saved"] = saved(folder, strategy, rank)
        if not devices:
            found["sent"] = sent(strategy)
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
