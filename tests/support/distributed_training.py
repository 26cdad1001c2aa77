"""Trains the cases and writes their outcomes.

    python distributed_training.py FOLDER here|workers|alone few|rest

"here" trains on one device and on two logical ones; "workers", in the processes of a cluster; "alone", as a script on
one device does. They also train on plain Keras; with "few", the first two also by hand.
"""

import itertools
import json
import sys
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute, repairs


def outcomes(names, strategy):
    """Each case's outcome, or its error."""
    from distributed_cases import trained  # after the strategy, since Keras may run something of TensorFlow

    found = {}
    for name in names:
        try:
            found[name] = trained(name, strategy)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def main():
    """Trains all of it."""
    folder, where, share = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if where == "here":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto")
    from distributed_cases import FEW, OF_WORKERS, REFUSED, SAME, STOCK, in_share, trained_by_hand

    repaired = [name for name, state in repairs.status().states.items() if state == "repaired"]
    repairs.remove()
    found = {"stock": outcomes(in_share(share, where, STOCK[where]), strategy)}
    repairs.install(*repaired)
    found["repaired"] = outcomes(in_share(share, where, SAME if where == "here" else OF_WORKERS), strategy)
    if where == "here":
        # Also those that the others train of this share, to compare.
        places = {place: in_share(share, place, SAME if place == "here" else OF_WORKERS) for place in FEW}
        found["one"] = outcomes(dict.fromkeys(itertools.chain(*places.values())), tf.distribute.get_strategy())
    if share == "few" and where != "alone":
        found["by hand"] = trained_by_hand(strategy)
    if share == "few" and where == "here":
        found["refused"] = outcomes(REFUSED, strategy)
        found["one by hand"] = trained_by_hand(tf.distribute.get_strategy())
    (folder / f"{where}{distribute.resolve().index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
