"""Explains why the input of one of several workers failed, where TensorFlow names an operation and an offset only."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from tfopt.errors import PipelineError, summarize_error

# Not those that TensorFlow raises when another worker is lost, nor the one with which data end.
_WRONG_INPUT = (
    tf.errors.DataLossError,
    tf.errors.InvalidArgumentError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.UnknownError,  # raised by a Python function
)
_INPUT = re.compile(r"\{\{node \w*IteratorGetNext|Error in user-defined function passed to \w*Dataset")
_WHERE = re.compile(r"\[*\{\{\w+ [^}]*\}\}\]*|\[\[\w*\]\]|\[Op:\w*\]( name:)?|<stack traces unavailable>")


@contextmanager
def explained_input_errors() -> Iterator[None]:
    """Raises a PipelineError that says what to do in place of TensorFlow's error for data that cannot be read."""
    try:
        yield
    except _WRONG_INPUT as error:
        text = str(error)
        if "FILE based sharding" in text or "unshardable source" in text:
            few = re.search(r"only has (\d+) file.* required (\d+)", text)
            found = f"files: {few[1]}, workers: {few[2]}" if few else "data that are not read from files"
            raise PipelineError(
                f"Expected a file for each worker, under AutoShardPolicy.FILE. Found: {found}. What to do: use "
                "AutoShardPolicy.DATA, with which each worker takes its part of the examples, or let build_pipeline "
                "divide the data."
            ) from error
        if not _INPUT.search(text):  # the model's error
            raise
        found = summarize_error(ValueError(_WHERE.sub("", text)))
        raise PipelineError(
            f"Expected data that can be read to the end of the epoch. Found: {type(error).__name__}: {found}. What to "
            "do: correct the data or the function that makes them; verify_records and verify_images of "
            "tfopt.pipelines find damaged files."
        ) from error
