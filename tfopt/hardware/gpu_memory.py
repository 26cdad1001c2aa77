"""GPU memory as TensorFlow's allocator counts it; NVML only sees that TensorFlow took nearly all of it at the start."""

import tensorflow as tf


def first_gpu() -> str | None:
    """Name of this process's first GPU, such as "GPU:0"; None without a GPU."""
    gpus = tf.config.list_logical_devices("GPU")
    return f"GPU:{gpus[0].name.rsplit(':', 1)[1]}" if gpus else None


def in_use_bytes(device: str) -> int:
    """Bytes in use on a GPU."""
    return int(tf.config.experimental.get_memory_info(device)["current"])


def peak_bytes(device: str) -> int:
    """Most bytes in use on a GPU since the process started or `reset_peak` was called."""
    return int(tf.config.experimental.get_memory_info(device)["peak"])


def reset_peak(device: str) -> None:
    """Resets the peak of a GPU to the bytes now in use."""
    tf.config.experimental.reset_memory_stats(device)


def limit_bytes(device: str) -> int | None:
    """Most bytes that TensorFlow may take on a device; None if it does not know the device."""
    from tensorflow.python import pywrap_tfe
    from tensorflow.python.client import pywrap_tf_session
    from tensorflow.python.eager import context

    context.ensure_initialized()
    known = pywrap_tfe.TFE_ContextListDevices(context.context()._handle)
    wanted = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    for index in range(pywrap_tf_session.TF_DeviceListCount(known)):
        found = tf.DeviceSpec.from_string(pywrap_tf_session.TF_DeviceListName(known, index))
        if (found.device_type, found.device_index) == ((wanted.device_type or "").upper(), wanted.device_index or 0):
            return int(pywrap_tf_session.TF_DeviceListMemoryBytes(known, index))
    return None
