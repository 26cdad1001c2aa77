"""Whether a model may be trained under a dtype policy: computed in both, before the first step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf

from tfopt.errors import PipelineError, essence
from tfopt.measure import one_batch
from tfopt.model.batches import as_dataset, not_finite_parts
from tfopt.model.layers import layer_paths
from tfopt.model.require import require_compiled
from tfopt.precision.comparing import NotFiniteError, compare
from tfopt.precision.falling_back import fallback
from tfopt.precision.layer_policies import Policy
from tfopt.precision.probing import forward
from tfopt.precision.report import PrecisionReport
from tfopt.text import listed


def check(model: keras.Model, data: Any, policy: Policy = "mixed_float16", *, batches: int = 3) -> PrecisionReport:
    """Runs the same weights on the same batches in float32 and under a policy, forward and backward, and compares.

    Use it before `tfopt.precision.apply`, and again later in training: values that overflow may only grow then. The
    model comes back as it was, bit for bit, under the policies that it had; one that is not built yet is built.

    Compared is what Keras' own `train_step` computes: the call with training=True, `compute_loss` and the gradients.
    Dropout is left out, since masks differ between dtypes, and a train_step of the model's own is not run. Where
    anything computes in float16 the loss is scaled, by the optimizer's dynamic scale or 2**15, halved until the
    gradients of the weights are finite. Layers inside of a loop, such as an RNN's cell, are judged with the layer
    around them. TF32 is off meanwhile.

    It does not pass if a layer's output or a gradient overflows; if zeros take 10 % of the norm of a layer's weight
    gradient, or 90 % of its output's; if one of them is further from float32's than twice its norm, or the loss than 32
    roundings of the dtype (3 % in float16, 25 % in bfloat16; 50 % in float8); or if logits or probabilities come out in
    16 bits. Where these limits come from stands in tfopt/precision/judging.py.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches or one batch: (x, y[, sample_weight]).
        policy: As for `apply`: a name, a Keras policy, "float8", or a mapping of layers to policies; {} checks the
            model under the policies that it has. For float8 a clone is compared.
        batches: How many batches of the dataset, those of another shape than the first one left out.

    Returns:
        The verdict, with the figures of each layer and a `fallback` where it did not pass.

    Raises:
        TypeError: `model` is no Keras model, `data` neither a dataset nor a batch, or a policy none.
        ValueError: The model is not compiled, has no layers that compute in floating point, or is not finite in float32
            already; batches that it does not take; an unknown policy or layer; `batches` below 1.
        tfopt.errors.PipelineError: The dataset or its first batch is empty, or a batch holds values that are not
            finite.
        tfopt.errors.UnsupportedError: The model cannot be put under the policy, or does not compute under it; or not
            under float32, as one with quantized layers or with weights in 16 bits.

    Example:
        >>> report = tfopt.precision.check(model, dataset, "mixed_float16")
        >>> print(report.verdict)
        mixed_float16 passes: the loss differs by <0.01 % from float32's.
        >>> tfopt.precision.apply(model, "mixed_float16" if report.passed else report.fallback)
    """
    require_compiled(model)
    if isinstance(batches, bool) or not isinstance(batches, Integral) or batches < 1:
        raise ValueError(
            f"Expected batches to be an integer of at least 1. Received: batches={batches!r}. "
            "A few are enough: they are run forward and backward."
        )
    few = _first(data, int(batches))
    _built(model, few[0])
    try:
        compared = compare(model, few, policy)
    except NotFiniteError as error:
        raise _not_finite(model, few, error.args[0]) from error
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        raise _not_taken(few[0], error) from error
    if compared.report.passed:
        return compared.report
    return replace(compared.report, fallback=fallback(model, few, policy, compared))


def _first(data: Any, count: int) -> list[Any]:
    """The first batches, as far as they have the shapes of the first one: others would have to be traced again."""
    few = list(as_dataset(data).take(count)) or [one_batch(data)]
    shapes = [[part.shape for part in _parts(batch)] for batch in few]
    if any(shape.rank and shape[0] == 0 for shape in shapes[0]):
        raise PipelineError(
            f"Expected batches of at least one example. Found: {_described(few[0])}. Check the dataset's source, and "
            "what filters it."
        )
    return [batch for batch, its in zip(few, shapes, strict=True) if its == shapes[0]]


def _parts(batch: Any) -> list[Any]:
    """The tensors of a batch; None stands where an output of the model has no target."""
    return [part for part in tf.nest.flatten(batch) if part is not None]


def _described(batch: Any) -> Any:
    return tf.nest.map_structure(lambda part: None if part is None else f"{part.dtype.name} {tuple(part.shape)}", batch)


def _built(model: keras.Model, batch: Any) -> None:
    """Traces the model and its loss as they stand: builds what is not built, and refuses batches of wrong shapes."""
    try:
        tf.function(lambda batch: forward(model, batch)[1], autograph=False).get_concrete_function(batch)
    except Exception as error:  # whatever the user's layers and loss raise
        raise _not_taken(batch, error) from error
    finally:
        model._clear_losses()  # it would keep tensors of that graph


def _not_taken(batch: Any, error: Exception) -> ValueError:
    return ValueError(
        "Expected batches (x, y[, sample_weight]) that the model and its loss take in a graph. Received: "
        f"{_described(batch)}. Found: {essence(error)}. Pass what model.fit takes as a dataset, or one batch."
    )


def _not_finite(model: keras.Model, batches: Sequence[Any], layer: str | None) -> Exception:
    """The error for what is no matter of precision."""
    already = "float32 already gives a loss or gradient that is NaN or infinite"
    for number, batch in enumerate(batches):
        if wrong := not_finite_parts(batch):
            return PipelineError(
                f"Expected batches of finite numbers. Found: NaN or infinity in {' and '.join(wrong)} of batch "
                f"{number}; {already}. Clean the data: tf.debugging.assert_all_finite in the pipeline tells where they "
                "come from."
            )
    values = [(f"{path}/{x.name}", tf.convert_to_tensor(x.value)) for path, x in _weights(model)]
    weights = [name for name, value in values if not_finite_parts(value)]
    if weights:
        return ValueError(
            f"Expected a model with finite weights. Received: {model.name!r} with NaN or infinity in "
            f"{listed(weights, 4)}; {already}. Load weights from before the training diverged."
        )
    where = f", from {layer!r} on" if layer else ""
    return ValueError(
        f"Expected a model that is finite in float32. Received: {model.name!r}, where {already}{where}. "
        "Mend that first: no policy would."
    )


def _weights(model: keras.Model) -> Iterator[tuple[str, keras.Variable]]:
    for layer, path in layer_paths(model).items():
        yield from ((path, variable) for variable in (*layer._trainable_variables, *layer._non_trainable_variables))
