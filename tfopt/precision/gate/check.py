"""`check`: whether a model may train under a dtype policy, and which layers must stay in float32 if not."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from tfopt import checks
from tfopt.errors import PipelineError, UnsupportedError, summarize_error
from tfopt.model.batches import first_alike_batches, not_finite_parts, specs_of
from tfopt.model.layers import layer_paths, require_compiled
from tfopt.model.undoing import only_looks
from tfopt.precision.gate.comparison import Comparison, compare, recurrent_layers
from tfopt.precision.gate.precision_report import PrecisionReport
from tfopt.precision.gate.probe import NotFiniteError
from tfopt.precision.gate.training_step import build
from tfopt.precision.layer_policies import Policy, assign_policies, name_of
from tfopt.precision.policies import named, recommend
from tfopt.text import listed

_FALLBACK_ROUNDS = 6


@only_looks
def check(model: keras.Model, data: Any, policy: Policy = "auto", *, batches: int = 3) -> PrecisionReport:
    """Checks whether a model may train under a dtype policy, by running the same weights and batches in float32 and
    under it.

    Use it before `tfopt.precision.apply`, and again later in training, since values may grow until they overflow. The
    model comes back unchanged, bit for bit; one that is not built yet is built.

    It compares what the model's `train_step` computes: the call with training=True, the loss and the gradients, with
    the loss scaled as in training and TF32 switched off. Dropout is taken out, since masks differ between dtypes.
    Layers inside a loop, such as an RNN's cell, are judged with the layer around them. docs/precision.md lists what
    does not pass; tfopt/precision/gate/verdict.py says where those limits come from.

    Args:
        model: A compiled model.
        data: A tf.data.Dataset of batches or one batch: (x, y[, sample_weight]).
        policy: As for `apply`: a name ("auto" for what `recommend()` names and `set_policy("auto")` sets on this
            machine), a Keras policy, "float8", or a mapping of layers to policies; {} checks the model under its
            present policies. float8 is checked on a clone.
        batches: How many batches of the dataset to use; those with other shapes than the first are skipped.

    Returns:
        The verdict, with figures per layer, and a `fallback` if it did not pass.

    Raises:
        TypeError: If `model` is not a Keras model, `data` neither a dataset nor a batch, or `policy` not a policy.
        ValueError: If the model is not compiled, has no layers that compute in floating point, is not finite in float32
            or does not take the batches; if a policy or layer is unknown; if `batches` is not an integer of at least 1.
        tfopt.errors.PipelineError: If the dataset or its first batch is empty, or a batch holds NaN or infinity.
        tfopt.errors.UnsupportedError: If the model does not compute under the policy, or in float32, as with quantized
            layers or 16-bit weights, or if it recomputes activations (keras.remat) and the second run would differ.

    Example:
        >>> report = tfopt.precision.check(model, dataset)
        >>> print(report.verdict)
        mixed_bfloat16 passes: the loss differs by <0.01 % from float32's.
        >>> tfopt.precision.apply(model, report.policy if report.passed else report.fallback or "float32")
    """
    require_compiled(model)
    asked, policy = policy, named(policy)  # once: a fallback must name what was checked
    count = checks.count("batches", batches, "A few are enough: each runs forward and backward.")
    few = first_alike_batches(data, count)
    try:
        build(model, few[0])
    except UnsupportedError:
        raise
    except Exception as error:  # whatever the user's layers and loss raise
        raise _not_taken(few[0], error) from error
    try:
        comparison = compare(model, few, policy)
    except NotFiniteError as error:
        raise _not_finite(model, few, error.args[0]) from error
    except tf.errors.ResourceExhaustedError:
        raise
    except tf.errors.OpError as error:
        raise _not_taken(few[0], error) from error
    if comparison.report.passed:
        if asked != "auto" or policy != "float32":
            return comparison.report
        note = f'"auto" is float32 here: {recommend().reason} Name a policy to check what another machine would set.'
        return replace(comparison.report, notes=(note, *comparison.report.notes))
    find = _find_fallback if comparison.mends else _in_bfloat16
    return replace(comparison.report, fallback=find(model, few, policy, comparison))


def _not_taken(batch: Any, error: Exception) -> ValueError:
    return ValueError(
        "Expected batches (x, y[, sample_weight]) that the model and its loss accept in a graph. Received: "
        f"{specs_of(batch)}. Found: {summarize_error(error)}. Pass what model.fit takes as a dataset, or one batch."
    )


def _not_finite(model: keras.Model, batches: Sequence[Any], layer: str | None) -> Exception:
    """The error for a loss or gradient that is not finite in float32 either."""
    already = "the loss or a gradient is NaN or infinite already in float32"
    for number, batch in enumerate(batches):
        if wrong := not_finite_parts(batch):
            return PipelineError(
                f"Expected batches of finite numbers. Found: NaN or infinity in {' and '.join(wrong)} of batch "
                f"{number}; {already}. Clean the data; tf.debugging.assert_all_finite in the pipeline locates the "
                "values."
            )
    weights = [
        f"{path}/{variable.name}"
        for layer, path in layer_paths(model).items()
        for variable in (*layer._trainable_variables, *layer._non_trainable_variables)
        if not_finite_parts(tf.convert_to_tensor(variable.value))
    ]
    if weights:
        return ValueError(
            f"Expected a model with finite weights. Received: {model.name!r} with NaN or infinity in "
            f"{listed(weights, 4)}; {already}. Load weights from before the training diverged."
        )
    where = f", from {layer!r} on" if layer else ""
    return ValueError(
        f"Expected a model that is finite in float32. Received: {model.name!r}, where {already}{where}. "
        "Fix this first; no dtype policy will help."
    )


def _find_fallback(
    model: keras.Model, batches: Sequence[Any], policy: Policy, failed: Comparison
) -> dict[str, str] | None:
    """Takes layers back to float32 until the others pass; None if no round passed or all layers ended in float32.

    Each round takes back the layers blamed in the one before or, if there are no new ones, the worse half of the rest.
    """
    paths = failed.assigned.paths
    floating = {paths[layer] for layer in failed.assigned.policies}
    asked = {path: its.name for path, its in failed.policies.items() if path in floating}
    # With each layer goes everything inside it, with a cell its recurrent layer; with a model only its own operations.
    recurrent = recurrent_layers(paths)
    units = {
        path: [path] if isinstance(layer, keras.Model) else _inside(recurrent.get(path, path), paths.values())
        for layer, path in paths.items()
    }
    comparison, back = failed, _taken_back(failed, units, set())
    for _ in range(_FALLBACK_ROUNDS):
        attempt = asked | dict.fromkeys(back & floating, "float32")
        if all(name == "float32" for path, name in attempt.items() if path != paths[model]):
            return None
        try:
            comparison = compare(model, batches, attempt)
        except UnsupportedError:  # the block around them does not take two dtypes: take all of it back
            around = {inner for path in back for inner in _inside(path.rpartition("/")[0], units)}
            back = back | around if around - back else _taken_back(comparison, units, back)
            continue
        if comparison.report.passed:
            named = policy if isinstance(policy, Mapping) else {paths[model]: policy}
            short = {key: name_of(named[key]) for key in named}
            # Others cannot change: Normalization, or a layer of integers inside one that goes back.
            taken = back & floating
            short |= {path: "float32" for path in sorted(taken) if path.rpartition("/")[0] not in taken}
            one, other = assign_policies(model, short), comparison.assigned
            same = (one.policies, one.quantized) == (other.policies, other.quantized)
            return short if same else attempt
        back = _taken_back(comparison, units, back)
    return None


def _in_bfloat16(
    model: keras.Model, batches: Sequence[Any], policy: Policy, failed: Comparison
) -> dict[str, str] | None:
    """The same layers in bfloat16, which needs no loss scale, in place of float16; None if that does not pass."""
    paths = failed.assigned.paths
    layers = failed.assigned.policies if isinstance(policy, Mapping) else [model]
    names = {paths[layer]: failed.policies[paths[layer]].name for layer in layers}
    attempt = {path: re.sub(r"(?<!b)float16", "bfloat16", name) for path, name in names.items()}
    try:
        return attempt if compare(model, batches, attempt).report.passed else None
    except UnsupportedError:
        return None


def _taken_back(comparison: Comparison, units: Mapping[str, list[str]], back: set[str]) -> set[str]:
    """The layers in float32 after another round."""
    new = [path for path in comparison.to_float32 if path not in back]
    layers = sorted(comparison.report.layers, key=lambda layer: layer.own_error, reverse=True)
    left = [layer.path for layer in layers if layer.path not in back]
    return back | {inner for path in new or left[: (len(left) + 1) // 2] for inner in units[path]}


def _inside(outer: str, paths: Iterable[str]) -> list[str]:
    """A layer and everything in it; nothing for the outermost level, whose path is empty."""
    return [path for path in paths if outer and (path + "/").startswith(outer + "/")]
