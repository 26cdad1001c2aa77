"""Refuses functions whose randomness would be frozen, or could not be repeated under a seed, or that lose a label."""

import inspect
from collections import Counter
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.elements import accepts_seed
from tfopt.pipelines.shared.layers import is_layer
from tfopt.pipelines.shared.nondeterminism import Finding
from tfopt.pipelines.shared.options import PipelineOptions, function_name, unmarked


def refuse_frozen(options: PipelineOptions, source: list[Finding], transform: list[Finding]) -> None:
    """Refuses random operations before the cache: each epoch would get the first one's draws again.

    Also where cache="auto" would find no room now: whether a model trains on fresh draws must not hang on the memory
    that happens to be free.

    Args:
        options: The pipeline's options.
        source: What was found in the source's dataset and its `decode`.
        transform: What was found in `transform`.

    Raises:
        ValueError: There are random operations, and `cache` is not None.
    """
    if options.cache is None:
        return
    frozen = "the cache would freeze its result, and every epoch would be the same."
    for found in _only(transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {frozen} Move it to `augment`, which runs "
            "behind the cache, or pass cache=None."
        )
    for found in _only(source, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {frozen} Take it out and pass it as `augment`, or "
            "pass cache=None."
        )
    for found in _only(source, "shuffle"):
        if options.training and not options.shuffle:
            raise ValueError(
                f"Expected a source that does not shuffle. It holds {found}: the cache would freeze its order. Pass "
                "shuffle=True in its place, or cache=None."
            )


def refuse_unrepeatable(
    options: PipelineOptions, source: list[Finding], transform: list[Finding], augment: list[list[Finding]]
) -> None:
    """Refuses what a seed could not make the same on every run.

    Args:
        options: The pipeline's options.
        source: What was found in the source's dataset and its `decode`.
        transform: What was found in `transform`.
        augment: What was found in each function of `augment`.

    Raises:
        ValueError: `seed` is given, and the source, `transform` or `augment` draws random numbers not derived from it.
    """
    if options.seed is None:
        return
    broken = f"seed={options.seed} could not make it the same on every run."
    for found in _only(source, "random", "assigning", "shuffle"):
        raise ValueError(
            f"Expected a deterministic source. It holds {found}: {broken} Take it out (`shuffle` and `augment` do it "
            "under the pipeline's seed), or pass seed=None."
        )
    for found in _only(transform, "random", "assigning"):
        raise ValueError(
            f"Expected a deterministic `transform`. It holds {found}: {broken} Move it to an `augment` with a keyword "
            "`seed`, or pass seed=None."
        )
    draws = ("random", "assigning")
    for function, findings in zip(options.augmentations, augment, strict=True):
        for found in _only(findings, *(draws if accepts_seed(unmarked(function)) else (*draws, "opaque"))):
            raise ValueError(
                f"Expected an `augment` that draws from its keyword `seed` alone. It holds {found}: {broken} Give it "
                "a keyword `seed` (int32, shape (2,)) and use stateless operations with it, such as "
                "tf.image.stateless_random_flip_left_right(image, seed), or pass seed=None."
            )


def refuse_restarting(stage: str, findings: Iterable[Finding]) -> None:
    """Refuses random operations with a fixed seed: TensorFlow repeats their draws in every epoch.

    Args:
        stage: "augment" or "transform".
        findings: What was found in it.

    Raises:
        ValueError: There are such operations.
    """
    for found in findings:
        if found.restarts:
            raise ValueError(
                f"Expected {stage!r} to draw anew in each epoch. It holds {found} with a fixed seed, from an argument "
                "or from tf.random.set_seed (which keras.utils.set_random_seed calls): in a dataset it repeats its "
                "draws in every epoch. Use an `augment` with a keyword `seed` (int32, shape (2,)) and stateless "
                "operations, such as tf.image.stateless_random_flip_left_right(image, seed)."
            )


def refuse_varying(stage: str, first: Counter[tuple[str, bytes]], second: Counter[tuple[str, bytes]]) -> None:
    """Refuses a function that TensorFlow's tracing turns into unlike graphs: a draw of NumPy or Python is in them.

    Args:
        stage: "decode", "transform" or "augment".
        first: The contents of one trace.
        second: The contents of another.

    Raises:
        ValueError: They are unlike.
    """
    if first == second:
        return
    found = " and then ".join(_shown(next(iter(only), None)) for only in (first - second, second - first))
    raise ValueError(
        f"Expected {stage!r} to be the same whenever TensorFlow traces it. Found {found}: random numbers of Python or "
        "NumPy (or the time) are drawn once, when the pipeline is built, and that draw serves every element of every "
        "epoch. Draw in an `augment` with a keyword `seed` (int32, shape (2,)) and stateless operations, such as "
        "tf.random.stateless_uniform((), seed), or with tf.random in place of them."
    )


def refuse_bare_layer(stage: str, function: Any, spec: Any) -> None:
    """Refuses a Keras layer of one input for examples that are tuples: the label would be taken for `training`.

    Args:
        stage: "decode", "transform" or "augment".
        function: The function, perhaps a layer.
        spec: The element spec of the examples.

    Raises:
        TypeError: It is such a layer.
    """
    if not is_layer(function) or type(spec) is not tuple or len(spec) < 2:
        return
    parameters = inspect.signature(function.call).parameters.values()
    # What can be passed by keyword only, as the **kwargs of a Sequential's call, takes no part of an example.
    by_keyword = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    inputs = [part for part in parameters if part.name not in ("training", "mask") and part.kind not in by_keyword]
    if len(inputs) < len(spec) and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in inputs):
        raise TypeError(
            f"Expected a function of {len(spec)} arguments for {stage!r}: examples are tuples. Found the layer "
            f"{function_name(function)}, which takes {len(inputs)}. Wrap it: "
            "lambda image, label: (layer(image), label). With cache='device' it may be an `augment` as it is."
        )


def _shown(item: tuple[str, bytes] | None) -> str:
    if item is None:
        return "nothing"
    operation, value = item
    if operation != "Const":
        return f"an operation {operation}"
    flat = tf.make_ndarray(tf.compat.v1.AttrValue.FromString(value).tensor).ravel()
    return f"the constant {flat[0] if flat.size == 1 else flat[:3].tolist()}"


def _only(findings: Iterable[Finding], *kinds: str) -> list[Finding]:
    return [finding for finding in findings if finding.kind in kinds]
