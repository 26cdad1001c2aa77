"""Settings and layers that keep XLA off for a model, found without tracing."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import keras
from tensorflow.python.framework.config import is_op_determinism_enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Something that keeps XLA off for a model or would fail under it."""

    kind: str
    """A setting ("run_eagerly", "replicas", "determinism"), a "layer" for which Keras keeps XLA off, an "operation"
    without an XLA kernel, or a "compilation" that fails although there are kernels."""
    found: str
    """What was found, as a sentence."""
    remedy: str
    """What to do."""
    layer: str | None = None
    """Path of the layer at fault; None outside all layers."""
    operation: str | None = None
    """Type of the operation at fault, such as "EagerPyFunc"; None if there is no single one."""

    def to_dict(self) -> dict[str, str | None]:
        """Returns JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}"


def standing_obstacles(model: keras.Model) -> tuple[Obstacle, ...]:
    """Returns what keeps XLA off for a model regardless of its operations, without tracing it."""
    return (*_settings(model), *map(_layer_obstacle, _layers_without_jit(model)))


def _settings(model: keras.Model) -> Iterator[Obstacle]:
    if model.run_eagerly:
        yield Obstacle(
            kind="run_eagerly",
            found="the model runs eagerly (run_eagerly=True)",
            remedy="Compile it with run_eagerly=False.",
        )
    strategy = model._distribute_strategy
    devices = len(strategy.extended.worker_devices) if strategy else 1
    if devices > 1:
        yield Obstacle(
            kind="replicas",
            found=f"the model trains on {devices} devices of this process, and XLA compiles one program for all, "
            "which can only reach the variables of one device",
            remedy="Leave XLA off, or run one process for each device.",
        )
    if is_op_determinism_enabled():
        yield Obstacle(
            kind="determinism",
            found="op determinism is on, and Keras turns XLA off for it",
            remedy="Leave XLA off, or remove tf.config.experimental.enable_op_determinism().",
        )


def _layers_without_jit(layer: keras.Layer) -> Iterator[keras.Layer]:
    """Outermost layers without XLA support. Their parts need not be listed."""
    if not layer.supports_jit:
        yield layer
    else:
        for part in layer._flatten_layers(include_self=False, recursive=False):
            yield from _layers_without_jit(part)


def _layer_obstacle(layer: keras.Layer) -> Obstacle:
    return Obstacle(
        kind="layer",
        found=f"layer {layer.path or layer.name} ({type(layer).__name__}) does not support XLA",
        remedy=_remedy(layer),
        layer=layer.path or layer.name,
    )


def _remedy(layer: keras.Layer) -> str:
    if isinstance(layer, keras.layers.LSTM | keras.layers.GRU):
        return "Create it with use_cudnn=False, and measure whether that pays: tfopt.xla.decide(model, data)."
    if ".preprocessing." in type(layer).__module__:
        return "Move it from the model to the input pipeline: dataset.map(lambda x, y: (layer(x), y))."
    return "Its class sets supports_jit = False: set True if its operations compile, or move it to the input pipeline."
