"""What stands between a model and XLA."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import keras
from tensorflow.python.framework.config import is_op_determinism_enabled


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One thing that keeps XLA off for a model, or would fail under it.

    Attributes:
        kind: "run_eagerly", "replicas" or "determinism" (a setting), "layer" (Keras keeps XLA off for it), "operation"
            (XLA has no kernel for it) or "compilation" (XLA has one, and cannot use it here).
        found: What it is, in words.
        remedy: What to do.
        layer: The path of the layer it is in; None outside every layer.
        operation: The operation's type, such as "EagerPyFunc"; None where no single one is at fault.
    """

    kind: str
    found: str
    remedy: str
    layer: str | None = None
    operation: str | None = None

    def to_dict(self) -> dict[str, str | None]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.found}. {self.remedy}"


def standing_obstacles(model: keras.Model) -> tuple[Obstacle, ...]:
    """What keeps XLA off for a model whatever its operations are: nothing is traced to know it."""
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
            found=f"the model trains on {devices} devices of this process, and XLA makes one program of them, which "
            "reaches the variables of a single device only",
            remedy="Leave XLA off, or run one process for each device.",
        )
    if is_op_determinism_enabled():
        yield Obstacle(
            kind="determinism",
            found="op determinism is on, for which Keras turns XLA off",
            remedy="Leave XLA off, or do without tf.config.experimental.enable_op_determinism().",
        )


def _layers_without_jit(layer: keras.Layer) -> Iterator[keras.Layer]:
    """The outermost layers that XLA does not support: what they are made of is no matter of its own."""
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
        return "Make it with use_cudnn=False, and measure whether that pays: tfopt.xla.decide(model, data)."
    if ".preprocessing." in type(layer).__module__:
        return "Take it out of the model and into the input pipeline: dataset.map(lambda x, y: (layer(x), y))."
    return (
        "Its class sets supports_jit = False: set True if its operations compile, or compute it in the input pipeline."
    )
