"""TensorFlow's runtime: devices, seeds, kernels and iterators of this process."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfopt.internals.sources import private

DistributedVariable = private("tensorflow.python.distribute.values:DistributedVariable")
"""A variable with a copy on each replica."""

EagerResourceDeleter = private("tensorflow.python.ops.resource_variable_ops:EagerResourceDeleter")
"""Deletes a resource when it is itself deleted."""

OwnedIterator = private("tensorflow.python.data.ops.iterator_ops:OwnedIterator")
"""Of a tf.data.Dataset, without a strategy."""

RandomRecordReader = private("tensorflow.python.lib.io._pywrap_record_io:RandomRecordReader")
"""Reads TFRecords at offsets."""

RecordIterator = private("tensorflow.python.lib.io._pywrap_record_io:RecordIterator")
"""Reads a TFRecord file without a graph."""

SyncOnReadVariable = private("tensorflow.python.distribute.values:SyncOnReadVariable")
"""Of which each replica updates its own copy."""

is_op_determinism_enabled = private("tensorflow.python.framework.config:is_op_determinism_enabled")

_context = private("tensorflow.python.eager.context")
_execute = private("tensorflow.python.eager.execute:execute")
_pack_tangents = private("tensorflow.python.eager.forwardprop_util:pack_tangents")
_pywrap_tf_session = private("tensorflow.python.client.pywrap_tf_session")
_pywrap_tfe = private("tensorflow.python.pywrap_tfe")
_trace = private("tensorflow.python.profiler.trace")


def is_profiling() -> bool:
    """Whether TensorFlow's profiler runs."""
    enabled = _trace.enabled  # a function since TensorFlow 2.19
    return bool(enabled() if callable(enabled) else enabled)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`."""
    seed: int | None = _context.global_seed()
    return seed


def random_generator() -> Any:
    """Python's generator from which eager random operations take their seeds; None before a seed is set."""
    return getattr(_context.context(), "_rng", None)


def clear_kernels() -> None:
    """Frees the kernels that TensorFlow keeps of operations that ran eagerly."""
    _context.context().clear_kernel_cache()


def run_operation(operation: str, outputs: int, inputs: Sequence[Any], attributes: Sequence[Any]) -> list[tf.Tensor]:
    """Runs an operation by name, eagerly. `attributes` are names and values in turn."""
    found: list[tf.Tensor] = _execute(operation.encode(), outputs, list(inputs), tuple(attributes), _context.context())
    return found


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows any of the tensors."""
    return bool(_pack_tangents(list(tensors)).tangents)


def memory_limit(device: str) -> int | None:
    """Most bytes that TensorFlow may take on a device; None if it does not know the device. Starts the devices."""
    _context.ensure_initialized()
    known = _pywrap_tfe.TFE_ContextListDevices(_context.context()._handle)
    wanted = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    for index in range(_pywrap_tf_session.TF_DeviceListCount(known)):
        found = tf.DeviceSpec.from_string(_pywrap_tf_session.TF_DeviceListName(known, index))
        if (found.device_type, found.device_index) == ((wanted.device_type or "").upper(), wanted.device_index or 0):
            return int(_pywrap_tf_session.TF_DeviceListMemoryBytes(known, index))
    return None
