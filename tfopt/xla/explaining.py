"""Explains, before the first step, why a model cannot run under XLA."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError
from tfopt.model.batches import Data, as_dataset, first_batch, on_device
from tfopt.model.layers import require_compiled
from tfopt.model.state import trace_train_step
from tfopt.text import Shown
from tfopt.xla.obstacles import Obstacle, batch_refused, device, obstacles_of, standing_obstacles

_EXAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """Whether XLA can compile a model's training step, and what prevents it."""

    obstacles: tuple[Obstacle, ...]
    """What prevents it, each with its layer, operation and remedy. Empty if XLA can compile what was examined."""
    examined: str
    """What was examined: "the training step"."""
    device: str
    """Target device: "GPU" or "CPU"."""
    auto: bool
    """Whether Keras' jit_compile="auto" switches XLA on for this model."""
    auto_reason: str
    """Why."""

    @property
    def supported(self) -> bool:
        """Whether XLA can compile the model."""
        return not self.obstacles

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        plain = {name: getattr(self, name) for name in ("supported", "examined", "device", "auto", "auto_reason")}
        return plain | {"obstacles": [obstacle.to_dict() for obstacle in self.obstacles]}

    def __str__(self) -> str:
        verdict = "can compile this model" if self.supported else "cannot compile this model"
        return "\n".join(
            [
                f"XLA {verdict} on a {self.device} (examined: {self.examined}).",
                *(f"- {obstacle}" for obstacle in self.obstacles),
                f'jit_compile="auto" is {"on" if self.auto else "off"}: {self.auto_reason}.',
            ]
        )


def explain(model: keras.Model, data: Data | None = None) -> Explanation:
    """Names every layer and operation that keeps XLA off for a model or would fail under it, each with its remedy.

    Use it before the first step, or after XLA failed. The training step is traced and lowered, but nothing is compiled
    to machine code and nothing runs: weights, metrics, seeds and what `fit` has compiled do not change. (An unbuilt
    model is built.) It cannot see problems that XLA finds when it generates code; `tfopt.xla.decide(model, data)` runs
    the step.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, whose first batch is used, or one batch (x, y[, sample_weight]). None: zeros
            in the shape of the model's inputs, without loss, metrics and optimizer.

    Returns:
        What prevents XLA on this machine's device.

    Raises:
        ValueError: If the model is not compiled, has no layers or cannot take the batch, or if `data` is None and the
            shape of the model's inputs is unknown.
        TypeError: If `model` is not a Keras model, or `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the step recomputes a part (keras.remat) that computes something else the
            second time.

    Example:
        >>> print(tfopt.xla.explain(model, dataset))
        XLA cannot compile this model on a CPU (examined: the training step).
        - XLA has no kernel for PrintV2 in layer sequential/noisy (sequential_1/noisy_1/PrintV2). Remove the print …
        jit_compile="auto" is off: TensorFlow sees no GPU.
    """
    require_compiled(model)
    if isinstance(model, keras.Sequential) and not model.layers:
        raise ValueError(f"Expected a model with layers. Received: {model.name!r}, which has none. Add layers first.")
    standing = standing_obstacles(model)
    found: tuple[Obstacle, ...] = ()
    if any(obstacle.kind == "replicas" for obstacle in standing):
        examined = "its settings and layers"
    elif data is None:
        examined = "the forward pass and its gradient; loss, metrics and optimizer need data"
        found = obstacles_of(_gradients_of(model), _batch_of_zeros(model))
    else:
        examined, found = "the training step", _obstacles_in_training(model, data)
    covered = {obstacle.layer for obstacle in standing if obstacle.layer}
    return Explanation(
        obstacles=(*standing, *(obstacle for obstacle in found if not _inside(obstacle.layer, covered))),
        examined=examined,
        device=device(),
        auto=bool(not model.run_eagerly and model._resolve_auto_jit_compile()),
        auto_reason=_auto_reason(model, standing),
    )


def _obstacles_in_training(model: keras.Model, data: Data) -> tuple[Obstacle, ...]:
    batch = on_device(model, first_batch(model, as_dataset(data)))
    if model.run_eagerly or model._distribute_strategy:  # everything must be built before it is traced
        try:
            with batch_refused():
                trace_train_step(model, batch, jit_compile=False)
        except UnsupportedError as error:
            return (
                Obstacle(
                    kind="compilation",
                    found=f"TensorFlow cannot trace the training step ({error.__cause__})",
                    remedy="Write it with TensorFlow or keras.ops operations only.",
                ),
            )

    def step(batch: Any) -> Any:
        return model.distribute_strategy.run(model.train_step, args=(batch,))

    return obstacles_of(step, batch)


def _gradients_of(model: keras.Model) -> Callable[[Any], Any]:
    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            total = tf.add_n([tf.reduce_sum(tf.cast(output, "float32")) for output in [*outputs, *model.losses]])
        return tape.gradient(total, [variable.value for variable in model.trainable_variables])

    return step


def _batch_of_zeros(model: keras.Model) -> Any:
    """Zeros in the shape of the model's inputs."""
    inputs = getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)
    shapes = [tuple(tensor.shape[1:]) for tensor in tf.nest.flatten(inputs) if tensor is not None]
    if not shapes or any(None in shape for shape in shapes):
        raise ValueError(
            f"Expected data, since the input shape of {model.name!r} is not fixed. Received: data=None, and inputs of "
            f"shape {shapes or 'unknown'}. Pass a dataset or one batch."
        )
    return tf.nest.map_structure(lambda tensor: tf.zeros((_EXAMPLES, *tensor.shape[1:]), tensor.dtype), inputs)


def _inside(layer: str | None, covered: set[str]) -> bool:
    """Whether a layer is covered, or part of a covered one."""
    return layer is not None and any(f"{layer}/".startswith(f"{outer}/") for outer in covered)


def _auto_reason(model: keras.Model, standing: tuple[Obstacle, ...]) -> str:
    if model.run_eagerly:
        return "the model runs eagerly"
    if all(device.device_type == "CPU" for device in tf.config.list_physical_devices()):
        return "TensorFlow sees no GPU"
    if model._distribute_strategy:
        return "the model was built in a strategy's scope"
    if standing:
        return standing[0].found
    return "there is a GPU, and Keras looks only at layers, not at their operations"
