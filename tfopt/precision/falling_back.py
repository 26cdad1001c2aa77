"""A policy for each layer that passes where one for all does not: the worst layers back in float32."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras

from tfopt.errors import UnsupportedError
from tfopt.model.layers import layer_paths
from tfopt.precision.comparing import Compared, compare
from tfopt.precision.float8 import split_float8
from tfopt.precision.layer_policies import Policy, resolved
from tfopt.precision.policy_names import name_of

_ROUNDS = 6


def fallback(model: keras.Model, batches: Sequence[Any], policy: Policy, failed: Compared) -> dict[str, str] | None:
    """Takes layers back to float32 until the others pass, as comparing again shows.

    Each round takes back what the one before blamed; where that is nothing new, the worse half of what is left.

    Args:
        model: The model.
        batches: Those that `policy` failed on.
        policy: What failed.
        failed: How it failed.

    Returns:
        A map from paths to names of policies; None where no round passed, or all layers went back.
    """
    paths = layer_paths(model)
    floating = {paths[layer] for layer in resolved(model, "float32")}
    asked = {path: its.name for path, its in failed.policies.items() if path in floating}
    units = _units(model)
    compared, back = failed, _taken_back(failed, units, set())
    for _ in range(_ROUNDS):
        attempt = asked | dict.fromkeys(back & floating, "float32")
        if all(name == "float32" for path, name in attempt.items() if path != paths[model]):
            return None
        try:
            compared = compare(model, batches, attempt)
        except UnsupportedError:  # what is around them does not take two dtypes: all of it, then
            around = {inner for path in back for inner in _inside(path.rpartition("/")[0], units)}
            back = back | around if around - back else _taken_back(compared, units, back)
            continue
        if compared.report.passed:
            return _short(model, policy, attempt, back)
        back = _taken_back(compared, units, back)
    return None


def _taken_back(compared: Compared, units: Mapping[str, list[str]], back: set[str]) -> set[str]:
    """What is back in float32 after another round."""
    new = [path for path in compared.back if path not in back]
    layers = sorted(compared.report.layers, key=lambda layer: layer.own_error, reverse=True)
    left = [layer.path for layer in layers if layer.path not in back]
    return back | {inner for path in new or left[: (len(left) + 1) // 2] for inner in units[path]}


def _units(model: keras.Model) -> dict[str, list[str]]:
    """What goes back with each layer: all that is inside it, but of a model, whose own operations are meant."""
    paths = {path: layer for layer, path in layer_paths(model).items()}
    return {path: [path] if isinstance(layer, keras.Model) else _inside(path, paths) for path, layer in paths.items()}


def _inside(outer: str, paths: Iterable[str]) -> list[str]:
    """A layer and all in it; nothing for the model itself, which has no path."""
    return [path for path in paths if outer and (path + "/").startswith(outer + "/")]


def _short(model: keras.Model, policy: Policy, full: Mapping[str, str], back: Iterable[str]) -> dict[str, str]:
    """A full map as exceptions to the policy it began with, where that says the same."""
    named = policy if isinstance(policy, Mapping) else {layer_paths(model)[model]: policy}
    given = {key: name_of(named[key]) for key in named}
    back = set(back)
    short = given | {path: "float32" for path in sorted(back) if path.rpartition("/")[0] not in back}
    return short if _assigned(model, short) == _assigned(model, full) else dict(full)


def _assigned(model: keras.Model, policy: Policy) -> tuple[dict[keras.Layer, keras.DTypePolicy], set[keras.Layer]]:
    base, quantized = split_float8(model, policy)
    return resolved(model, base), set(quantized)
