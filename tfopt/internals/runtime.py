"""TensorFlow's runtime: devices, seeds, kernels and iterators of this process."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.data.ops.iterator_ops import OwnedIterator
from tensorflow.python.distribute.values import DistributedVariable, SyncOnReadVariable
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.forwardprop_util import pack_tangents
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.lib.io._pywrap_record_io import RandomRecordReader, RecordIterator
from tensorflow.python.ops.resource_variable_ops import EagerResourceDeleter
from tensorflow.python.profiler import trace

__all__ = [
    "DistributedVariable",  # a variable with a copy on each replica
    "EagerResourceDeleter",  # deletes a resource when it is itself deleted
    "OwnedIterator",  # of a tf.data.Dataset, without a strategy
    "RandomRecordReader",  # reads TFRecords at offsets
    "RecordIterator",  # reads a TFRecord file without a graph
    "SyncOnReadVariable",  # of which each replica updates its own copy
    "clear_kernels",
    "global_seed",
    "has_tangents",
    "is_op_determinism_enabled",
    "is_profiling",
    "memory_limit",
    "random_generator",
    "run_operation",
]


def is_profiling() -> bool:
    """Whether TensorFlow's profiler runs."""
    enabled = trace.enabled  # a function since TensorFlow 2.19
    return bool(enabled() if callable(enabled) else enabled)


def global_seed() -> int | None:
    """The seed of `tf.random.set_seed`."""
    seed: int | None = context.global_seed()
    return seed


def random_generator() -> Any:
    """Python's generator from which eager random operations take their seeds; None before a seed is set."""
    return getattr(context.context(), "_rng", None)


def clear_kernels() -> None:
    """Frees the kernels that TensorFlow keeps of operations that ran eagerly."""
    context.context().clear_kernel_cache()


def run_operation(operation: str, outputs: int, inputs: Sequence[Any], attributes: Sequence[Any]) -> list[tf.Tensor]:
    """Runs an operation by name, eagerly. `attributes` are names and values in turn."""
    found: list[tf.Tensor] = execute.execute(
        operation.encode(), outputs, list(inputs), tuple(attributes), context.context()
    )
    return found


def has_tangents(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a `tf.autodiff.ForwardAccumulator` follows any of the tensors."""
    return bool(pack_tangents(list(tensors)).tangents)


def memory_limit(device: str) -> int | None:
    """Most bytes that TensorFlow may take on a device; None if it does not know the device. Starts the devices."""
    context.ensure_initialized()
    known = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    wanted = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    for index in range(pywrap_tf_session.TF_DeviceListCount(known)):
        found = tf.DeviceSpec.from_string(pywrap_tf_session.TF_DeviceListName(known, index))
        if (found.device_type, found.device_index) == ((wanted.device_type or "").upper(), wanted.device_index or 0):
            return int(pywrap_tf_session.TF_DeviceListMemoryBytes(known, index))
    return None
