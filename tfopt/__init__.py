"""tfopt keeps the GPU busy under Keras on TensorFlow, and never silently changes what is computed.

- `tfopt.diagnose`: what slows a training down, found by experiment, with the remedies
- `tfopt.precision`: mixed-precision policies, recommended for the device that is there
- `tfopt.xla`: XLA on or off for a model, decided by measurement
- `tfopt.kernels`: flash attention and fused batch norm, layer by layer
- `tfopt.memory`: what a training step takes of the GPU's memory, and how to need less
- `tfopt.batch`: the fastest batch size, and gradients accumulated over several batches
- `tfopt.pipelines`: `build_pipeline()`, tf.data pipelines that keep the device fed
- `tfopt.compress`: what each layer of a model costs, cheaper ones, and pruning
- `tfopt.fit`: `model.fit` that launches each step without waiting for the one before
- `tfopt.distribute`: the same script on one GPU, on all of a machine, and on many machines
- `tfopt.callbacks`: utilisation and throughput loggers for `model.fit`, and checkpoints of a training
- `tfopt.checkpoint`: what a folder of checkpoints holds, whether it is whole, and back into a model
- `tfopt.repairs`: silent defects of Keras, named and repaired
- `tfopt.measure`: how long a training step takes, with an interval
- `tfopt.hardware`: what the GPUs and the host are and do
- `tfopt.errors`: what can go wrong

The command `tfopt-bench` measures all of it on this machine. Importing tfopt loads neither TensorFlow nor Keras.
"""

import functools
import re
from pathlib import Path

import lazy_loader

__version__ = "0.1.0"

# The names stand in __init__.pyi, for type checkers and for lazy_loader alike.
_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name in __all__:
        return _load(name)
    # Read, since importing the packages for `from tfopt import text` would be slow.
    found = [f"tfopt.{package}.{name}" for package, names in _stubs() if name in names]
    hint = f". Did you mean {' or '.join(found)}?" if found else ""
    raise AttributeError(f"No tfopt attribute {name}{hint}")


@functools.cache
def _stubs():
    """The public packages, each with its names."""
    stubs = [stub for stub in Path(__file__).parent.glob("*/__init__.pyi") if stub.parent.name in __all__]
    return [(stub.parent.name, re.findall(r" as (\w+)$", stub.read_text("utf-8"), re.MULTILINE)) for stub in stubs]
