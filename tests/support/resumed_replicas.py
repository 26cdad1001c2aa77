"""Interrupts and resumes trainings on two logical devices, and prints what differs from uninterrupted ones, as JSON.

python resumed_replicas.py FOLDER CASE MOMENT...

A process holds few trainings: TensorFlow's collectives on a CPU may hang in one of many.
"""

import json
import sys
import warnings
from pathlib import Path

import tensorflow as tf

from tfopt import distribute


def main():
    """Trains all of it."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = distribute.strategy("auto")
    from resumed_fits import CASES, MOMENTS, difference

    folder, case, *moments = sys.argv[1:]
    found = {
        moment: difference(CASES[case], Path(folder) / str(number), MOMENTS[moment], strategy)
        for number, moment in enumerate(moments)
    }
    print("FOUND", json.dumps({"replicas": strategy.num_replicas_in_sync, "differences": found}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
