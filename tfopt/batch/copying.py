"""A compiled model carried into another process: its configuration, which must give the same model there."""

import importlib
import pickle
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.internals.runtime import is_op_determinism_enabled
from tfopt.model.layers import layers_and_graphs
from tfopt.model.state import trace_train_step

# What Keras itself sets on each layer or model, what `tfopt.fit.overlap` replaces around the step, and methods that no
# trial calls, which `tfopt.memory.explained_errors` replaces.
_HARMLESS = (
    *("build", "quantize", "loss", "_make_function", "_maybe_symbolic_build"),
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
)
_REGISTER = "register it with keras.saving.register_keras_serializable in a module that can be imported"


class Copy(NamedTuple):
    """What makes a model, picklable."""

    model: bytes
    """Keras' serialised model, pickled."""
    modules: Sequence[str]
    """Those that register the user's classes and functions."""
    repaired: Sequence[str]
    """Installed repairs."""
    settings: dict[str, Any]
    traits: Any
    """What the copy must have, too."""


def to_copy(model: keras.Model) -> Copy:
    """Returns what another process needs to make a model like this one, with weights of the same shapes.

    Args:
        model: Compiled, and built with its optimizer.

    Raises:
        tfopt.errors.UnsupportedError: If it cannot be copied; the message is a part of a sentence.
    """
    for part in (*layers_and_graphs(model), model.optimizer):
        if part is not None and (names := _replaced(part)):
            raise UnsupportedError(f"{names[0]!r} of {part.name!r} is replaced on this object alone")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lambdas, which are unsafe in files from elsewhere
            serialised = pickle.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # whatever the user's get_config raises
        raise UnsupportedError(_reason(error)) from error
    registered = keras.saving.get_custom_objects().values()
    return Copy(
        model=serialised,
        modules=sorted({each.__module__ for each in registered} - {"__main__"}),
        repaired=[name for name, each in repairs.REPAIRS.items() if each.installed],
        settings={
            "floatx": keras.config.floatx(),
            "image_data_format": keras.config.image_data_format(),
            "policy": keras.config.dtype_policy().name,
            "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
            "deterministic": is_op_determinism_enabled(),
            "threads": (
                tf.config.threading.get_intra_op_parallelism_threads(),
                tf.config.threading.get_inter_op_parallelism_threads(),
            ),
            "jit_compile": model.jit_compile,
            "run_eagerly": model.run_eagerly,
        },
        traits=_traits(model),
    )


def copied_here(copy: Copy, batch: Any) -> keras.Model:
    """Makes the model in this process, whose global settings become those of the other.

    Raises:
        tfopt.errors.UnsupportedError: If the copy differs, or does not train on `batch`.
    """
    _apply(copy.settings)
    if copy.repaired:
        repairs.install(*copy.repaired)
    try:
        for module in copy.modules:
            importlib.import_module(module)
        model = keras.saving.deserialize_keras_object(pickle.loads(copy.model), safe_mode=False)
        model.jit_compile, model.run_eagerly = copy.settings["jit_compile"], copy.settings["run_eagerly"]
        trace_train_step(model, tf.nest.map_structure(lambda part: None if part is None else tf.constant(part), batch))
    except Exception as error:  # whatever the user's module or from_config raises
        raise UnsupportedError(_reason(error)) from error
    differing = [name for name, trait in _traits(model).items() if trait != copy.traits[name]]
    if differing:
        raise UnsupportedError(f"its copy has other {' and '.join(differing)}; its get_config is not complete")
    return model


def _apply(settings: dict[str, Any]) -> None:
    intra, inter = settings["threads"]
    tf.config.threading.set_intra_op_parallelism_threads(intra)
    tf.config.threading.set_inter_op_parallelism_threads(inter)
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_image_data_format(settings["image_data_format"])
    keras.config.set_dtype_policy(settings["policy"])
    tf.config.experimental.enable_tensor_float_32_execution(settings["tf32"])
    if settings["deterministic"]:
        tf.config.experimental.enable_op_determinism()


def _replaced(part: Any) -> list[str]:
    """Methods replaced on one object, which a copy of it would lack."""
    return [
        name
        for name, value in vars(part).items()
        if name not in _HARMLESS and callable(value) and callable(getattr(type(part), name, None))
    ]


def _traits(model: keras.Model) -> dict[str, Any]:
    """What a true copy has in common with a model."""
    layers, optimizer = model._flatten_layers(), model.optimizer
    slots = [(tuple(slot.shape), str(slot.dtype)) for slot in optimizer.variables] if optimizer else []
    return {
        "layers": [(_class(layer), layer.dtype_policy.name, layer.trainable) for layer in layers],
        "weights": [(tuple(weight.shape), str(weight.dtype)) for weight in model.variables],
        "optimizer": (_class(optimizer), slots),
        "metrics": [tuple(variable.shape) for variable in model.metrics_variables],
    }


def _class(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _reason(error: Exception) -> str:
    """The first sentence of an error, or of the one that Keras quotes in it, and what helps if that is known."""
    said = str(error).rpartition("Exception encountered: ")[2].strip()
    first = said.split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__
    return f"{first}; {_REGISTER}" if first.startswith("Could not locate") else first
