"""Prints what this machine trains on, as a line of JSON, and the XLA flags with which processes share a cache.

    python benchmarks/campaign/machine.py CACHE_FOLDER

In a process of its own, because TensorFlow takes a GPU's memory.
"""

import importlib.metadata
import json
import os
import platform
import sys

import keras
import tensorflow as tf

from tfopt.hardware import gpus
from tfopt.measure import environment
from tfopt.xla.autotune_cache import share_cache


def torch_version():
    """The installed PyTorch's, without loading it; None without one."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    share_cache(sys.argv[1])  # first: XLA reads its flags when devices start
    seen = tf.config.list_physical_devices("GPU")
    found = {
        "gpu": tf.config.experimental.get_device_details(seen[0])["device_name"] if seen else None,
        "gpus_of_the_driver": [gpu.name for gpu in gpus()],
        "driver": environment()["driver"],
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "torch": torch_version(),
        "python": platform.python_version(),
        "xla_flags": os.environ.get("XLA_FLAGS"),
    }
    print(json.dumps(found))
