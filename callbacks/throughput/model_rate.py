"""The model's FLOPs per second and their share of the devices' peak."""

import threading
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.callbacks.shared.running_fit import running_iterator
from tfopt.hardware import gpus
from tfopt.hardware.peaks import peak_tflops
from tfopt.text import listed
from tfopt.warn import warn_once

_PARTS_NAMED = 3
_LONGEST_COUNT_SECONDS = 10.0
_THREAD = "tfopt-flops"


@dataclass(frozen=True, slots=True)
class ModelRate:
    """Converts examples per second into the model's FLOPs per second and MFU. None: unknown."""

    flops_per_example: float | None
    """FLOPs of a training step on one example."""
    peak_tflops: float | None
    """What all devices can do together, in 10¹² FLOPs per second."""

    def figures(self, examples_per_second: float | None) -> dict[str, float | None]:
        """Returns the figures by log key."""
        if self.flops_per_example is None or examples_per_second is None:
            return {"model_tflops_per_second": None, "mfu_percent": None}
        tflops = self.flops_per_example * examples_per_second / 1e12
        return {
            "model_tflops_per_second": tflops,
            "mfu_percent": None if self.peak_tflops is None else 100 * tflops / self.peak_tflops,
        }


class CountedRate:
    """The rate of a model whose FLOPs are counted after its first step, in a thread: a large graph takes half a second.

    Args:
        flops_per_example: None: counted.
        device_tflops: What one device can do. None: as NVIDIA lists it for this GPU.
    """

    def __init__(self, flops_per_example: float | None, device_tflops: float | None):
        self._given_flops, self._given_peak = flops_per_example, device_tflops
        self._thread: threading.Thread | None = None
        self.begin()

    def begin(self) -> None:
        """Starts a training."""
        self.wait()
        self.counts = False
        """Whether this training's FLOPs are known or being counted."""
        self.known = ModelRate(self._given_flops, None)
        """What is known so far."""

    def count(self, model: keras.Model, examples_per_step: float | None) -> None:
        """Starts to count, after the first step. Call it from a hook of `fit`, whose batches it looks for."""
        self.counts = True
        spec = getattr(running_iterator(), "element_spec", None)
        thread = threading.Thread(target=self._count, args=(model, spec, examples_per_step or 1.0), name=_THREAD)
        try:
            thread.start()
        except RuntimeError as error:
            warn_once(
                "thread of FLOPs",
                f"Expected to start a thread that counts FLOPs. Found: {error}. The training goes on without them. "
                "Check the process limit (ulimit -u; pids.max of the control group).",
            )
            return
        self._thread = thread

    def wait(self) -> None:
        """Waits for the count."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_LONGEST_COUNT_SECONDS)

    def _count(self, model: keras.Model, spec: Any, examples_per_step: float) -> None:
        self.known = model_rate(model, spec, examples_per_step, self._given_flops, self._given_peak)


def model_rate(
    model: keras.Model,
    element_spec: Any,
    examples_per_step: float,
    flops_per_example: float | None,
    device_tflops: float | None,
) -> ModelRate:
    """Returns the rate for a model that has trained a step; warns once if its FLOPs cannot be counted.

    Args:
        model: The model being fitted.
        element_spec: Of its batches; None: unknown.
        examples_per_step: Over all replicas.
        flops_per_example: None: counted.
        device_tflops: What one device can do. None: as NVIDIA lists it for this GPU.
    """
    # Imported late: it takes longer to load than all callbacks together.
    from tfopt.model.flops import ModelFlops, fit_flops

    try:
        counted = fit_flops(model, element_spec, examples_per_step)
    except Exception as error:  # noqa: BLE001  an observer must not end a training
        counted = ModelFlops({}, (f"the whole model ({error!r})",), examples_per_step)
    if flops_per_example is None:
        flops_per_example = counted.per_example
        if counted.unknown:
            warn_once(
                f"flops_per_example {model.name}",
                f"Expected a training step whose FLOPs can be counted. Found in {model.name!r}: "
                f"{listed(counted.unknown, _PARTS_NAMED)}. No mfu_percent and no model_tflops_per_second are logged; "
                "pass ThroughputLogger(flops_per_example=…).",
            )
    if flops_per_example is None:
        return ModelRate(None, None)
    device = device_tflops or _listed_tflops(counted.dtype or model.compute_dtype)
    replicas = model.distribute_strategy.num_replicas_in_sync
    return ModelRate(flops_per_example, None if device is None else device * replicas)


def _listed_tflops(dtype: str) -> float | None:
    """The listed peak of this process's GPUs in a dtype, if they are all the same model."""
    visible = [int(device.name.rpartition(":")[2]) for device in tf.config.get_visible_devices("GPU")]
    names = {gpu.name for gpu in gpus() if gpu.index in visible} if visible else set()
    if len(names) != 1:
        return None
    (name,) = names
    if dtype == "float32" and tf.config.experimental.tensor_float_32_execution_enabled():
        return peak_tflops(name, "tensorfloat32") or peak_tflops(name, "float32")
    return peak_tflops(name, dtype)
