"""Trains the cases and writes what came out: python distributed_training.py FOLDER here|workers

"here" trains on one device and on two logical ones; "workers", in the processes of a cluster. Both also train a few on
Keras as it is.
"""

import json
import sys
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute, repairs


def outcomes(names, strategy):
    """What came out of each case, or its error."""
    from distributed_cases import trained  # after the strategy: Keras may run something of TensorFlow

    found = {}
    for name in names:
        try:
            found[name] = trained(name, strategy)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def main():
    """Trains all of it."""
    folder, where = Path(sys.argv[1]), sys.argv[2]
    if where == "here":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto")
    from distributed_cases import OF_WORKERS, REFUSED, SAME, STOCK, trained_by_hand

    repairs.remove()
    found = {"stock": outcomes(STOCK[where], strategy)}
    repairs.install(*repairs.REPLICAS)
    found["repaired"] = outcomes(SAME if where == "here" else OF_WORKERS, strategy)
    found["by hand"] = trained_by_hand(strategy)
    if where == "here":
        found["one"] = outcomes(SAME, tf.distribute.get_strategy())
        found["refused"] = outcomes(REFUSED, strategy)
        found["one by hand"] = trained_by_hand(tf.distribute.get_strategy())
    (folder / f"{where}{distribute.resolve().index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
