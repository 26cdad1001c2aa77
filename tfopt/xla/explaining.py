"""Explains, before the first step, why a model cannot run under XLA, and whether it computes the same there."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import UnsupportedError, summarize_error
from tfopt.measure import StepTimer
from tfopt.model.batches import Data, as_dataset, first_batch, on_device
from tfopt.model.layers import require_compiled
from tfopt.model.state import trace_train_step
from tfopt.model.undoing import only_looks
from tfopt.text import Shown
from tfopt.xla.comparing import compare_results, computes_in_16_bits
from tfopt.xla.obstacles import (
    Obstacle,
    batch_refused,
    device,
    obstacles_of,
    standing_obstacles,
    wrong_operations_of,
)

_EXAMPLES = 8


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """Whether XLA can run a model's training step and gives the same results, and what stands in its way."""

    obstacles: tuple[Obstacle, ...]
    """What stands in its way, each with its layer, operation, line and remedy. Empty if XLA can compile what was
    examined, once for each batch shape, and, where results were compared, gives the same ones or is not to blame for
    the difference."""
    examined: str
    """What was examined: "the training step"."""
    results: str
    """A sentence that says whether results with and without XLA were compared, and what came of it."""
    distance: float | None
    """Distance between the results relative to their norm: of the first result that XLA gets wrong, or the largest
    distance if there is none. Infinite if shapes differ, or which numbers are finite. None if results were not
    compared."""
    device: str
    """Target device: "GPU" or "CPU"."""
    auto: bool
    """Whether Keras' jit_compile="auto" switches XLA on for this model."""
    auto_reason: str
    """Why."""

    @property
    def supported(self) -> bool:
        """Whether XLA can compile the model and, where results were compared, gets none wrong."""
        return not self.obstacles

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values. A distance that is not finite becomes null."""
        names = ("supported", "examined", "results", "device", "auto", "auto_reason")
        distance = self.distance if self.distance is not None and math.isfinite(self.distance) else None
        obstacles = [obstacle.to_dict() for obstacle in self.obstacles]
        return {name: getattr(self, name) for name in names} | {"distance": distance, "obstacles": obstacles}

    def __str__(self) -> str:
        kinds = {obstacle.kind for obstacle in self.obstacles}
        if kinds - {"results", "recompilation"}:
            verdict = "cannot compile this model"
        elif "results" in kinds:
            verdict = "gives wrong results for this model"
        else:
            verdict = "compiles this model again and again" if kinds else "can compile this model"
        return "\n".join(
            [
                f"XLA {verdict} on a {self.device} (examined: {self.examined}).",
                *([self.results] if self.supported else []),
                *(f"- {obstacle}" for obstacle in self.obstacles),
                f'jit_compile="auto" is {"on" if self.auto else "off"}: {self.auto_reason}.',
            ]
        )


@only_looks
def explain(model: keras.Model, data: Data | None = None) -> Explanation:
    """Names every layer and operation that keeps XLA off for a model, fails under XLA, or gives wrong results there.

    Use it before the first step, or after XLA failed. The training step is traced and lowered. If nothing stands in
    XLA's way and there is data, a few steps run with and without XLA, without dropout, and the first layer is named
    whose outputs or gradients differ by more than rounding: by 1 % of their norm, or 10 % if a layer computes in 16
    bits. In 16 bits XLA is to blame only if it is more than twice as far from float32 as TensorFlow. Weights, metrics,
    seeds and what `fit` has compiled do not change. (An unbuilt model is built.)

    Without data nothing is compiled to machine code and nothing runs: operations known to be wrong under XLA
    (docs/repairs.md, D22) are found, but no results are compared.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches, whose first batch is used, or one batch (x, y[, sample_weight]). None: zeros
            in the shape of the model's inputs, without loss, metrics and optimizer, and nothing is compared.

    Returns:
        What stands in XLA's way on this machine's device.

    Raises:
        ValueError: If the model is not compiled, has no layers or cannot take the batch, or if `data` is None and the
            shape of the model's inputs is unknown.
        TypeError: If `model` is not a Keras model, or `data` is neither a dataset nor a batch.
        tfopt.errors.PipelineError: If the dataset is empty.
        tfopt.errors.UnsupportedError: If the step recomputes activations (keras.remat) and the second run would differ
            from the first, as with dropout.

    Example:
        >>> print(tfopt.xla.explain(model, dataset))
        XLA cannot compile this model on a CPU (examined: the training step).
        - XLA has no kernel for PrintV2 in layer sequential/noisy (sequential_1/noisy_1/PrintV2 at net.py:41). …
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
        examined, batch = "the training step", on_device(model, first_batch(model, as_dataset(data)))
        found = obstacles_in_training(model, batch)
    covered = {obstacle.layer for obstacle in standing if obstacle.layer}
    obstacles = (*standing, *(obstacle for obstacle in found if not _inside(obstacle.layer, covered)))
    results, distance = "Its results were not compared with those without XLA", None
    if obstacles or data is None:
        results += "." if obstacles else "; pass data for that."
    else:
        results, distance, obstacles = compared(model, batch)
    return Explanation(
        obstacles=obstacles,
        examined=examined,
        results=results,
        distance=distance,
        device=device(),
        auto=bool(not model.run_eagerly and model._resolve_auto_jit_compile()),
        auto_reason=_auto_reason(model, standing),
    )


_IN_16_BITS = (
    " In 16 bits the result without XLA may be the inexact one: on CPUs, TensorFlow sums some gradients in 16 bits "
    "where XLA takes 32. Compare in float32: if both agree there, XLA is right."
)


def known_wrong(model: keras.Model) -> tuple[Obstacle, ...]:
    """Operations of the forward pass and its gradient that XLA is known to get wrong.

    None are found if the shape of the model's inputs is unknown, or if the model does not take zeros of it.
    """
    try:
        return wrong_operations_of(_gradients_of(model), _batch_of_zeros(model))
    except ValueError:
        return ()


def compared(
    model: keras.Model, batch: Any, tolerance: float | None = None
) -> tuple[str, float | None, tuple[Obstacle, ...]]:
    """`Explanation.results`, the distance, and the obstacles found by running the step.

    `tolerance` is as for `compare_results`.
    """
    try:
        found = compare_results(model, batch, tolerance)
    except tf.errors.ResourceExhaustedError:
        return "Its results were not compared with those without XLA: there is too little memory for it.", None, ()
    except tf.errors.OpError as error:
        return _failed(model, batch, summarize_error(error))
    if found.unknown:
        return f"Its results cannot be compared with those without XLA: {found.unknown}.", None, ()
    if found.where is None:
        rounding = f"results differ by at most {found.distance:.1g} of their norm, which is rounding"
        return f"On this batch it computes the same with and without XLA: {rounding}.", found.distance, ()
    infinite = found.distance == math.inf
    how = "in shape or in which numbers are finite" if infinite else f"by {found.distance:.1g} of its norm"
    against_float32 = f"; from float32 it differs {found.errors}" if found.errors else ""
    results = f"Its results differ from those without XLA: {found.where}, {how}{against_float32}."
    if not found.wrong:
        return f"{results} So XLA is not to blame.", found.distance, ()
    first = "differs" if found.errors else "is the first that differs,"
    either = _IN_16_BITS if not found.errors and computes_in_16_bits(model) else ""
    different = Obstacle(
        kind="results",
        found=f"XLA gives different results on this batch: {found.where} {first} {how} "
        f"(up to {found.tolerance:g} would count as rounding){against_float32}",
        remedy=f"Write that layer with other operations, or leave XLA off.{either}",
        layer=found.layer,
    )
    return results, found.distance, (different,)


def _failed(model: keras.Model, batch: Any, error: str) -> tuple[str, float | None, tuple[Obstacle, ...]]:
    """As `compared`, if the step failed while its results were recorded: XLA may fuse it differently then."""
    with batch_refused():
        StepTimer(model, batch, jit_compile=False).results()
    try:
        StepTimer(model, batch, jit_compile=True).results()
    except tf.errors.OpError:
        found = f"XLA cannot run the training step: {error}"
        failed = Obstacle(kind="compilation", found=found, remedy="Leave XLA off.")
        return "Its results were not compared with those without XLA.", None, (failed,)
    return f"Its results cannot be compared with those without XLA: {error}.", None, ()


def obstacles_in_training(model: keras.Model, batch: Any) -> tuple[Obstacle, ...]:
    """What keeps XLA from compiling the training step, or from compiling it once; nothing runs."""
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
    def gradients(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            outputs = tf.nest.flatten(model(inputs, training=True))
            total = tf.add_n([tf.reduce_sum(tf.cast(output, "float32")) for output in [*outputs, *model.losses]])
        return tape.gradient(total, [variable.value for variable in model.trainable_variables])

    return lambda inputs: model.distribute_strategy.run(gradients, args=(inputs,))


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
