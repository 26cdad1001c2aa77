"""The model's operations per second, and what share of the devices' peak they are."""

from dataclasses import dataclass

import keras
import tensorflow as tf

from tfopt.hardware import gpus
from tfopt.hardware.peaks import peak_tflops
from tfopt.warn import warn_once

_NAMED = 3


@dataclass(frozen=True, slots=True)
class ModelRate:
    """What makes operations of examples.

    Attributes:
        flops_per_example: Operations of a training step on one example; None where unknown.
        peak_tflops: What all devices can do together, in 10¹² operations per second; None where unknown.
    """

    flops_per_example: float | None
    peak_tflops: float | None

    def figures(self, examples_per_second: float | None) -> dict[str, float | None]:
        """Under the keys of the logs; None where unknown."""
        if self.flops_per_example is None or examples_per_second is None:
            return {"model_tflops_per_second": None, "mfu_percent": None}
        tflops = self.flops_per_example * examples_per_second / 1e12
        return {
            "model_tflops_per_second": tflops,
            "mfu_percent": None if self.peak_tflops is None else 100 * tflops / self.peak_tflops,
        }


def model_rate(model: keras.Model, flops_per_example: float | None, device_tflops: float | None) -> ModelRate:
    """Returns what is given, what it counts and what is listed for the GPU; warns once where it cannot count.

    Args:
        model: The model that is fitted.
        flops_per_example: None: counted from the model.
        device_tflops: What one device can do. None: as listed.
    """
    # Here, as what it counts with takes longer to load than all callbacks together.
    from tfopt.model.flops import ModelFlops, model_flops

    try:
        counted = model_flops(model)
    except Exception as error:  # noqa: BLE001  what looks on must not end a training
        counted = ModelFlops({}, (f"the whole model ({error!r})",))
    if flops_per_example is None:
        flops_per_example = counted.per_example
        if counted.unknown:
            _warn(model, counted.unknown)
    if flops_per_example is None:
        return ModelRate(None, None)
    device = device_tflops or _listed_tflops(counted.dtype or model.compute_dtype)
    replicas = model.distribute_strategy.num_replicas_in_sync
    return ModelRate(flops_per_example, None if device is None else device * replicas)


def _listed_tflops(dtype: str) -> float | None:
    """The peak of this process's GPUs, if they are alike, in a dtype."""
    visible = [int(device.name.rpartition(":")[2]) for device in tf.config.get_visible_devices("GPU")]
    names = {gpu.name for gpu in gpus() if gpu.index in visible} if visible else set()
    if len(names) != 1:
        return None
    (name,) = names
    if dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        return peak_tflops(name, "tensorfloat32") or peak_tflops(name, "float32")
    return peak_tflops(name, dtype)


def _warn(model: keras.Model, unknown: tuple[str, ...]) -> None:
    named = ", ".join(unknown[:_NAMED]) + (", …" if len(unknown) > _NAMED else "")
    warn_once(
        f"flops_per_example {model.name}",
        f"Expected layers whose operations can be counted. Found in {model.name!r}: {named}. No mfu_percent and no "
        "model_tflops_per_second are logged; pass ThroughputLogger(flops_per_example=…).",
    )
