"""What a figure was measured on, without which it means nothing."""

import os
import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import keras
import tensorflow as tf

import tfopt
from tfopt import hardware

_PACKAGES = ("tensorflow", "keras", "numpy", "nvidia-ml-py", "tensorflow-datasets")
# Variables that change how fast TensorFlow runs or what it computes. No others, since they may hold secrets:
# Terraform's begin with TF_ too.
_PREFIXES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "KERAS_BACKEND",
    "KMP_",
    "NCCL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "TF_CPP_",
    "TF_CUDNN_",
    "TF_DETERMINISTIC_OPS",
    "TF_DISABLE_",
    "TF_ENABLE_",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "TF_GPU_",
    "TF_NUM_",
    "TF_USE_",
    "TF_XLA_FLAGS",
    "XLA_",
)


def environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Records versions, devices, driver, CPU, limits, global settings and relevant environment variables.

    Args:
        environ: The environment variables.

    Returns:
        JSON, with None for unknown values. It holds no host name, user name or working folder; XLA_FLAGS and the other
        variables appear as they were set.
    """
    gpus = hardware.gpus()
    build = tf.sysconfig.get_build_info()
    return {
        "tfopt": tfopt.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in _PACKAGES},
        "cuda": build.get("cuda_version"),
        "cudnn": build.get("cudnn_version"),
        "driver": gpus[0].driver_version if gpus else None,
        "gpus": [gpu.to_dict() for gpu in gpus],
        "devices": [device.name for device in tf.config.list_logical_devices()],
        "host": hardware.host().to_dict(),
        "settings": {
            "backend": keras.config.backend(),
            "dtype_policy": keras.config.dtype_policy().name,
            "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
            "intra_op_threads": tf.config.threading.get_intra_op_parallelism_threads(),
            "inter_op_threads": tf.config.threading.get_inter_op_parallelism_threads(),
        },
        "variables": {name: environ[name] for name in sorted(environ) if name.startswith(_PREFIXES)},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
