"""What tf.distribute under Keras cannot do, and where to go instead."""

import keras

from tfopt.errors import UnsupportedError

_SHARDING = "Keras on JAX with keras.distribution.ModelParallel, or PyTorch's FSDP"
_REFUSED = {
    "model_parallel": ("to split a model over devices", _SHARDING),
    "data_parallel": ("keras.distribution, which does nothing on TensorFlow", 'strategy("auto")'),
    "pipeline_parallel": ("to run the layers of a model on several devices in turn", "PyTorch's pipelining"),
    "zero": ("to shard the optimizer's state", _SHARDING),
    "fsdp": ("to shard the weights and the optimizer's state", _SHARDING),
    "parameter_server": (
        "asynchronous updates, whose result depends on timing",
        "tf.distribute with a loop of its own",
    ),
    "central_storage": ("variables in the host's memory, which Keras does not train", 'strategy("auto")'),
    "tpu": ("TPUs; tfopt is for GPUs", "tf.distribute.TPUStrategy, or Keras on JAX"),
}


def refuse(kind: object) -> None:
    """Raises for a strategy that is known and cannot work.

    Raises:
        tfopt.errors.UnsupportedError: It is such a one.
    """
    if not isinstance(kind, str) or kind.lower().replace("-", "_").replace(" ", "_") not in _REFUSED:
        return
    what, instead = _REFUSED[kind.lower().replace("-", "_").replace(" ", "_")]
    raise UnsupportedError(
        f"Expected a strategy that trains synchronously with the whole model on each device. Found {kind!r}: {what}. "
        f"Keras on TensorFlow cannot do it; use {instead}."
    )


def refuse_distribution() -> None:
    """Raises where somebody has set a `keras.distribution`, which is ignored on TensorFlow.

    Raises:
        tfopt.errors.UnsupportedError: One is set.
    """
    found = keras.distribution.distribution()
    if found is not None:
        raise UnsupportedError(
            f"Expected no keras.distribution on TensorFlow. Found {type(found).__name__}, which does nothing there: "
            "each device would train the whole model on all data. Take it back with "
            "keras.distribution.set_distribution(None)."
        )
