"""Traces each stage's function on a source's first elements, so that an error names its stage."""

import inspect
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines.shared.crop_elements import crop_example, expect_movable
from tfopt.pipelines.shared.elements import apply_stage, element_of, expect_lengths, in_single_examples, is_static
from tfopt.pipelines.shared.frozen_draws import generator_states, refuse_frozen_draws
from tfopt.pipelines.shared.nondeterminism import Finding, find_in_function
from tfopt.pipelines.shared.options import PipelineOptions, StageFunction, is_layer
from tfopt.pipelines.sources.source import Source

# AutoGraph lists the lines that led to an error: tfopt's own, and then the user's.
_OWN_FRAME = re.compile(rf'^ *File "{re.escape(str(Path(__file__).parents[1]))}/.*\n.*\n', re.MULTILINE)


_TOGETHER = 1024  # more than the elements that are looked at


@dataclass(frozen=True, slots=True)
class Traced:
    """A few elements of a source as datasets after each stage, and what may differ from call to call in each.

    A stage that is absent passes the same object on.
    """

    raw: Any  # as the source reads them
    decoded: Any  # after `decode` and a central crop: what a cache before `transform` holds
    examples: Any  # after `transform`
    # What functions of many make of all elements as one batch, and what it should be: their names, the examples of each
    # element alone, and the batch.
    together: list[tuple[str, Any, Any]]
    augmented: Any  # after `augment`; batches if it has functions of batches
    in_decode: list[Finding]
    in_transform: list[Finding]
    in_augment: list[list[Finding]]  # for each function
    functions: dict[str, list[Any]]  # the concrete functions of "decode", "crop" and "transform"


def trace(source: Source, options: PipelineOptions, raw: Any, *, again: bool = False) -> Traced:
    """Traces the stages on a few raw elements; refuses a function as `inspect_source` says.

    Args:
        source: The source.
        options: Those of the pipeline.
        raw: The raw elements.
        again: Leaves out `augment`, and what an earlier call has looked for: frozen draws, and functions of many that
            treat elements otherwise than alone.
    """
    _expect_tensors("read", source.name, raw)
    decoded, decode = _traced("decode", source.decode, raw, again=again)
    together: list[tuple[str, Any, Any]] = []
    decode_batch: list[Any] = []
    if source.decode_batch is not None:
        batch, decode_batch = _traced("decode", source.decode_batch, raw.batch(_TOGETHER), again=again)
        together.append((f"decode_batch of {source.name}", decoded, batch))
    cropped: Any = decoded
    crops: list[Any] = []
    if options.crop is not None:
        cropped, crops = _cropped(source, options.crop, options.crops_with, raw, decoded)
    transformation = options.transformation
    if transformation is not None and transformation.by_batch:
        _expect_one_length(transformation, cropped, options)
        batches, transform = _traced("transform", transformation.call, cropped.batch(1), again=again)
        examples = in_single_examples(batches)
        if not again:
            together.append((transformation.name, examples, _mapped(transformation, cropped.batch(_TOGETHER))))
    else:
        call = None if transformation is None else transformation.call
        examples, transform = _traced("transform", call, cropped, again=again)
    augmented, augment, batched = examples, [], False
    for function in () if again else options.augmentations:
        before = _batches(augmented, options) if function.by_batch and not (batched or source.batched) else augmented
        batched = function.by_batch
        seed = {"seed": tf.zeros(2, tf.int32)} if function.seeded else {}
        augmented, graphs = _traced("augment", function.call, before, **seed)
        augment.append(graphs)
    if options.crop is not None and not options.crop.random:
        decoded = cropped
    return Traced(
        raw=raw,
        decoded=decoded,
        examples=examples,
        together=together,
        augmented=augmented,
        in_decode=_findings([*decode, *decode_batch]),
        in_transform=_findings(transform),
        in_augment=[_findings(graphs) for graphs in augment],
        functions={"decode": [*decode, *decode_batch], "crop": crops, "transform": transform},
    )


def _findings(graphs: list[Any]) -> list[Finding]:
    return [finding for graph in graphs for finding in find_in_function(graph)]


def _expect_one_length(transformation: StageFunction, examples: Any, options: PipelineOptions) -> None:
    """Refuses a function of batches for examples of different lengths, since it would treat padding as data."""
    if options.pad is not None and not is_static(examples.element_spec):
        raise ValueError(
            f"Expected examples of one shape for the `transform` {transformation.name}, which takes batches: they are "
            f"padded after it. Found {examples.element_spec}. Pass a function of single examples, or leave out `pad`."
        )


def _batches(examples: Any, options: PipelineOptions) -> Any:
    if options.pad is not None:
        expect_lengths(examples.element_spec, bucket=options.bucket)
        return examples.padded_batch(options.batch_size)
    return examples.batch(options.batch_size)


def _cropped(source: Source, crop: Any, crop_with: dict[str, bool], raw: Any, decoded: Any) -> tuple[Any, list[Any]]:
    """Returns the cropped examples, and the graphs by which they are made."""
    before, graphs = decoded, []
    if source.encoded is not None:
        before = _mapped(StageFunction("decode", source.encoded), raw)
        graphs.append(before._map_func.function)
    expect_movable(before.element_spec, crop_with, "crop_with")
    seed = tf.zeros(2, tf.int32)
    call = partial(crop_example, crop=crop, crop_with=crop_with, seed=seed)
    cropped = _mapped(StageFunction("crop", call), before)
    return cropped, [*graphs, cropped._map_func.function]


def _traced(stage: str, function: Any, dataset: Any, *, again: bool = False, **keywords: Any) -> tuple[Any, list[Any]]:
    """Returns the dataset after a function, and its graph; the same dataset and none without a function."""
    if function is None:
        return dataset, []
    called = StageFunction(stage, function)
    if is_layer(function):
        _refuse_bare_layer(called, dataset.element_spec)
    states = generator_states(function)
    traced = _mapped(called, dataset, **keywords)
    _expect_tensors(stage, called.name, traced)
    graph = traced._map_func.function
    if not again:
        # A tf.function would keep its first trace.
        plain = StageFunction(stage, getattr(function, "python_function", function))
        new = partial(_mapped, plain, dataset, **keywords)
        refuse_frozen_draws(stage, function, lambda: new()._map_func.function, graph, states)
    return traced, [graph]


def _mapped(function: StageFunction, dataset: Any, **keywords: Any) -> Any:
    spec, returned = dataset.element_spec, []

    def call(*arguments: Any) -> Any:
        result = apply_stage(function.stage, function.call, element_of(arguments, spec), **keywords)
        returned.append(result)
        return result

    try:
        return dataset.map(call, name=function.stage)
    except Exception as error:
        # Dataset.map accepts None next to a tensor, and fails obscurely if there is nothing else.
        if returned and all(leaf is None for leaf in tf.nest.flatten(returned[0])):
            raise _no_tensors(function.stage, function.name, "None", "") from error
        # Only an error about the function's own arguments mentions them in its first line.
        spread = isinstance(error, TypeError) and type(spec) is tuple and "positional argument" in str(error)
        hint = f" Examples are tuples: a function of them takes {len(spec)} arguments." if spread else ""
        raise PipelineError(
            f"The pipeline's stage {function.stage!r} ({function.name}) failed while TensorFlow traced it, on "
            f"elements {spec}.{hint} {type(error).__name__}: {_OWN_FRAME.sub('', str(error))}"
        ) from error


def _expect_tensors(stage: str, name: str, dataset: Any) -> None:
    for leaf in tf.nest.flatten(dataset.element_spec):
        if leaf is None or isinstance(leaf, tf.data.DatasetSpec) or type(leaf).__name__ == "NoneTensorSpec":
            found = "a dataset" if isinstance(leaf, tf.data.DatasetSpec) else "None"
            raise _no_tensors(stage, name, found, f" in its elements {dataset.element_spec}")


def _no_tensors(stage: str, name: str, found: str, where: str) -> PipelineError:
    return PipelineError(
        f"Expected tensors from the pipeline's stage {stage!r} ({name}). Found {found}{where}. Return tensors only, "
        "and leave out what is missing."
    )


def _refuse_bare_layer(function: StageFunction, spec: Any) -> None:
    """Refuses a Keras layer of one input for examples that are tuples: it would take the label for `training`."""
    if type(spec) is not tuple or len(spec) < 2:
        return
    layer: Any = function.call
    parameters = inspect.signature(layer.call).parameters.values()
    # Keyword-only parameters, such as the **kwargs of a Sequential's call, take no part of an example.
    by_keyword = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    inputs = [part for part in parameters if part.name not in ("training", "mask") and part.kind not in by_keyword]
    if len(inputs) < len(spec) and not any(parameter.kind is parameter.VAR_POSITIONAL for parameter in inputs):
        raise TypeError(
            f"Expected a function of {len(spec)} arguments for {function.stage!r}: examples are tuples. Found the "
            f"layer {function.name}, which takes {len(inputs)}. Wrap it: "
            "lambda image, label: (layer(image), label). With cache='device' it may be an `augment` as it is."
        )
