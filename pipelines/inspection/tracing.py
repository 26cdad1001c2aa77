"""Traces each stage's function on a source's first elements, so that an error names its stage."""

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.crop import crop_example, expect_image
from tfopt.pipelines.shared.elements import accepts_seed, apply_stage, element_of, leaves
from tfopt.pipelines.shared.layer_function import is_layer
from tfopt.pipelines.shared.nondeterminism import Finding, contents, find_in_dataset, find_in_function
from tfopt.pipelines.shared.options import PerBatch, PipelineOptions, function_name, unmarked
from tfopt.pipelines.sources.source import Source

SAMPLED = 32  # elements the planner looks at


@dataclass(frozen=True, slots=True)
class Traced:
    """A few elements of a source as datasets after each stage, and what may differ from call to call in each.

    A stage that is absent passes the same object on.
    """

    raw: Any  # as the source reads them
    decoded: Any  # after `decode` and a central crop: what a cache before `transform` holds
    examples: Any  # after `transform`
    augmented: Any  # after `augment`; batches if it has functions of batches
    in_source: list[Finding]  # in the source's dataset and its `decode`
    in_transform: list[Finding]
    in_augment: list[list[Finding]]  # for each function


def trace(source: Source, whole: Any, options: PipelineOptions) -> Traced:
    """Traces the stages.

    Args:
        source: The source.
        whole: All its raw elements.
        options: The pipeline's options.

    Raises:
        PipelineError: If a function raised (the cause is chained), or returns something other than tensors.
        TypeError: If a function is a Keras layer of one input, and examples are tuples.
        ValueError: If a function differs each time it is traced, or examples hold no image to crop.
    """
    raw = source.sample(SAMPLED) if source.sample else whole.take(SAMPLED)
    _expect_tensors("read", source.name, raw)
    decoded, in_decode = _traced("decode", source.decode, raw)
    cropped = _cropped(source, options, raw, decoded)
    examples, in_transform = _traced("transform", options.transform, cropped)
    augmented, in_augment, batched = examples, [], False
    for function in options.augmentations:
        by_batch, plain = isinstance(function, PerBatch), unmarked(function)
        before = augmented.batch(options.batch_size) if by_batch and not batched else augmented
        batched = batched or by_batch
        seed = {"seed": tf.zeros(2, tf.int32)} if accepts_seed(plain) else {}
        augmented, found = _traced("augment", plain, before, **seed)
        in_augment.append(found)
    in_source = find_in_dataset(whole) + in_decode
    if options.crop is not None and not options.crop.random:
        decoded = cropped
    return Traced(raw, decoded, examples, augmented, in_source, in_transform, in_augment)


def _cropped(source: Source, options: PipelineOptions, raw: Any, decoded: Any) -> Any:
    if options.crop is None:
        return decoded
    before = decoded if source.encoded is None else _mapped("decode", source.encoded, raw, {})
    expect_image(before.element_spec)
    return _mapped("crop", partial(crop_example, crop=options.crop, seed=tf.zeros(2, tf.int32)), before, {})


def _traced(stage: str, function: Any, dataset: Any, **keywords: Any) -> tuple[Any, list[Finding]]:
    if function is None:
        return dataset, []
    _refuse_bare_layer(stage, function, dataset.element_spec)
    traced = _mapped(stage, function, dataset, keywords)
    _expect_tensors(stage, function_name(function), traced)
    plain = getattr(function, "python_function", function)  # a tf.function would keep its first trace
    first, second = traced, _mapped(stage, plain, dataset, keywords)
    # The first trace of a Keras layer may also build it.
    if plain is not function or _contents(first) != _contents(second):
        first, second = second, _mapped(stage, plain, dataset, keywords)
        _refuse_varying(stage, _contents(first), _contents(second))
    return traced, find_in_function(traced._map_func.function)


def _mapped(stage: str, function: Callable[..., Any], dataset: Any, keywords: dict[str, Any]) -> Any:
    spec, returned = dataset.element_spec, []

    def call(*arguments: Any) -> Any:
        result = apply_stage(stage, function, element_of(arguments, spec), **keywords)
        returned.append(result)
        return result

    try:
        return dataset.map(call, name=stage)
    except Exception as error:
        # Dataset.map accepts None next to a tensor, and fails obscurely if there is nothing else.
        if returned and all(leaf is None for leaf in leaves(returned[0])):
            raise _no_tensors(stage, function_name(function), "None", "") from error
        # Only an error about the function's own arguments mentions them in its first line.
        spread = isinstance(error, TypeError) and type(spec) is tuple and "positional argument" in str(error)
        hint = f" Examples are tuples: a function of them takes {len(spec)} arguments." if spread else ""
        raise PipelineError(
            f"The pipeline's stage {stage!r} ({function_name(function)}) failed while TensorFlow traced it, on "
            f"elements {spec}.{hint} {type(error).__name__}: {error}"
        ) from error


def _contents(mapped: Any) -> Any:
    return contents(mapped._map_func.function)


def _expect_tensors(stage: str, name: str, dataset: Any) -> None:
    for leaf in leaves(dataset.element_spec):
        if leaf is None or isinstance(leaf, tf.data.DatasetSpec) or type(leaf).__name__ == "NoneTensorSpec":
            found = "a dataset" if isinstance(leaf, tf.data.DatasetSpec) else "None"
            raise _no_tensors(stage, name, found, f" in its elements {dataset.element_spec}")


def _no_tensors(stage: str, name: str, found: str, where: str) -> PipelineError:
    return PipelineError(
        f"Expected tensors from the pipeline's stage {stage!r} ({name}). Found {found}{where}. Return tensors only, "
        "and leave out what is missing."
    )


def _refuse_varying(stage: str, first: Counter[tuple[str, bytes]], second: Counter[tuple[str, bytes]]) -> None:
    """Refuses a function whose traces differ: they contain a draw of NumPy or Python."""
    if first == second:
        return
    found = " and then ".join(_shown(next(iter(only), None)) for only in (first - second, second - first))
    raise ValueError(
        f"Expected {stage!r} to be the same whenever TensorFlow traces it. Found {found}: random numbers of Python or "
        "NumPy (or the time) are drawn once, when the pipeline is built, and that draw serves every element of every "
        "epoch. Draw in an `augment` with a keyword `seed` (int32, shape (2,)) and stateless operations, such as "
        "tf.random.stateless_uniform((), seed), or use tf.random instead."
    )


def _refuse_bare_layer(stage: str, function: Any, spec: Any) -> None:
    """Refuses a Keras layer of one input for examples that are tuples: it would take the label for `training`."""
    if not is_layer(function) or type(spec) is not tuple or len(spec) < 2:
        return
    parameters = inspect.signature(function.call).parameters.values()
    # Keyword-only parameters, such as the **kwargs of a Sequential's call, take no part of an example.
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
