"""tfopt keeps the GPU busy under Keras on TensorFlow, and never silently changes what is computed.

- `tfopt.diagnose`: what slows a training down, found by experiment, with the remedies
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

import lazy_loader

__version__ = "0.1.0"

# The names stand in __init__.pyi, for type checkers and for lazy_loader alike.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
