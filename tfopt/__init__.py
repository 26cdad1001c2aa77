"""tfopt keeps the GPU busy under Keras on TensorFlow, and never changes what is trained in silence.

- `tfopt.precision`: mixed-precision policies, recommended for the device that is there
- `tfopt.xla`: XLA on or off for a model, decided by measurement
- `tfopt.kernels`: flash attention and fused batch norm, layer by layer
- `tfopt.pipelines`: `build_pipeline()`, tf.data pipelines that keep the device fed
- `tfopt.fit`: `model.fit` that launches each step without waiting for the one before
- `tfopt.distribute`: the same script on one GPU, on all of a machine, and on many machines
- `tfopt.callbacks`: utilisation and throughput loggers for `model.fit`
- `tfopt.repairs`: silent defects of Keras, named and repaired
- `tfopt.measure`: how long a training step takes, with an interval
- `tfopt.hardware`: what the GPUs and the host are and do
- `tfopt.errors`: what can go wrong

The command `tfopt-bench` measures all of it on this machine. Importing tfopt loads neither TensorFlow nor Keras.
"""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfopt import callbacks as callbacks
    from tfopt import distribute as distribute
    from tfopt import errors as errors
    from tfopt import fit as fit
    from tfopt import hardware as hardware
    from tfopt import kernels as kernels
    from tfopt import measure as measure
    from tfopt import pipelines as pipelines
    from tfopt import precision as precision
    from tfopt import repairs as repairs
    from tfopt import xla as xla

__version__ = "0.1.0"

__all__ = [
    "callbacks",
    "distribute",
    "errors",
    "fit",
    "hardware",
    "kernels",
    "measure",
    "pipelines",
    "precision",
    "repairs",
    "xla",
]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return importlib.import_module(f"tfopt.{name}")
    raise AttributeError(f"module 'tfopt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
