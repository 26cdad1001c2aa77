"""What a user reads when a step runs out of the device's memory: who asked, what holds the rest, and what helps."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt import errors
from tfopt.errors import UnsupportedError, summarize_error
from tfopt.memory.estimating import MemoryEstimate, estimate
from tfopt.memory.gpus import MemoryUsage, room_mib, usage
from tfopt.memory.peak import layer_of, scopes_recorded
from tfopt.memory.remedies import Remedy, remedies
from tfopt.model.layers import require_model
from tfopt.model.state import STEP_FUNCTIONS
from tfopt.repairs import FAILED_STEPS
from tfopt.text import described, figure, readable_bytes, wrapped
from tfopt.warn import warn_once

_TRAINING, _EVALUATION, _PREDICTION = "a training step", "a step of the evaluation", "a step of the prediction"
_ENTRIES = {
    **dict.fromkeys(("fit", "train_on_batch"), _TRAINING),
    **dict.fromkeys(("evaluate", "test_on_batch"), _EVALUATION),
    **dict.fromkeys(("predict", "predict_on_batch"), _PREDICTION),
}
_CALL = "_tfopt_call"  # on errors: the call that raised it
_SPARE_SHARE = 0.1  # of what is free, for gaps that the allocator leaves
# In the texts of errors, in lower case.
_LACK = ("out of memory", "resource_exhausted", "alloc_failed", "failed to allocate")
_HALF_DONE = "The failed step may have changed some weights already. Go on from a checkpoint."
# Seen on a CPU: a program that gets no memory frees the variables that it was to update in place.
_LOST = (
    "Go on from a checkpoint, in a new process: under XLA, TensorFlow frees the memory of the weights as a step fails, "
    "and other tensors overwrite it."
)
_SMALLER = (
    "smaller batches: evaluate(..., batch_size=...), predict(..., batch_size=...), or "
    "fit(..., validation_batch_size=...)."
)
_GAPS = (
    "By this estimate it would fit. What is missing lies in gaps between tensors, which TF_GPU_ALLOCATOR="
    "cuda_malloc_async in the environment avoids, or is what cuDNN takes while a convolution runs."
)


class OutOfMemoryError(errors.OutOfMemoryError, tf.errors.ResourceExhaustedError):
    """The public error, and also the one that code written for TensorFlow catches."""


@contextmanager
def explained_errors(model: keras.Model) -> Iterator[None]:
    """Explains an out-of-memory error of a model's methods, and says what would help and by how much.

    Use it around `fit`, `evaluate`, `predict` or a loop of `train_on_batch`. If one runs out of the device's memory,
    TensorFlow's error becomes a `tfopt.errors.OutOfMemoryError`, which `except tf.errors.ResourceExhaustedError`
    catches too. It names the operation and layer that asked for memory, what holds the rest by `usage` and `estimate`,
    and up to three remedies in order of what they cost the training, each with what the step would then take. For these
    figures the step is traced again, and compiled if it is for XLA, but not run; the model stays as it is. They take a
    while; Ctrl-C raises TensorFlow's error at once. Other errors stay as they are, as do those of your own loop if it
    calls none of the model's methods. Call `tfopt.fit.overlap` before the block.

    Afterwards, resume from a checkpoint: a step that fails without XLA may have updated some of the weights, and
    changed the averages of batch normalization and random seeds. One that fails under XLA loses the weights, since
    TensorFlow frees their memory, so start a new process. `explained_errors` installs the repair `failed_steps`
    (`tfopt.repairs`), which keeps the optimizer from counting a step that failed without XLA, if its step function is
    traced from then on.

    Args:
        model: The model that trains, compiled before or inside the block.

    Raises:
        TypeError: If `model` is not a Keras model.
        tfopt.errors.OutOfMemoryError: If a step runs out of the device's memory; TensorFlow's error is its cause.

    Example:
        >>> with tfopt.memory.explained_errors(model):
        ...     model.fit(dataset, epochs=5)
    """
    require_model(model)
    with suppress(UnsupportedError):
        FAILED_STEPS.install()
    with _calls_noted(model):
        try:
            yield
        except tf.errors.OpError as error:
            request, call = _request(error), vars(error).get(_CALL)
            text = request and call and _explained(model, request, call)
            if text is None:
                raise
            raise OutOfMemoryError(error.node_def, error.op, text) from error


class _Call(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


@contextmanager
def _calls_noted(model: keras.Model) -> Iterator[None]:
    """Notes on each error of TensorFlow the innermost of a model's methods that it has ended."""

    def noting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except tf.errors.OpError as error:
                given = inspect.signature(method).bind(*args, **kwargs).arguments
                vars(error).setdefault(_CALL, _Call(name, given))
                raise

        return call

    before = {name: vars(model)[name] for name in _ENTRIES if name in vars(model)}
    # Past Keras' attribute tracking.
    vars(model).update({name: noting(name, getattr(model, name)) for name in _ENTRIES})
    try:
        yield
    finally:
        for name in _ENTRIES:
            vars(model).pop(name, None)
        vars(model).update(before)


class _Request(NamedTuple):
    """What an error says of the memory that was not there."""

    what: str
    node: str | None
    """The operation that asked."""
    gpu: int | None


def _tensor(found: re.Match[str]) -> str:
    sizes, dtype = [int(size) for size in found[1].split(",") if size], tf.as_dtype(found[2])
    return f"{readable_bytes(math.prod(sizes) * dtype.size)} (a {dtype.name} tensor of shape {sizes})"


def _bytes(found: re.Match[str]) -> str:
    return readable_bytes(float(found[1])) if found[2] in ("bytes", "B") else f"{found[1]} {found[2]}"


# TensorFlow's texts. Those after the first four come with other errors than ResourceExhaustedError too.
_FORMS: tuple[tuple[str, Callable[[re.Match[str]], str]], ...] = (
    (r"OOM when allocating tensor with shape\[([\d,]*)\] and type (\w+)", _tensor),
    (r"Out of memory while trying to allocate ([\d.]+) ?(bytes|[KMGT]?i?B)", _bytes),
    (r"Failed to allocate request for \S+ \((\d+)(B)\)", _bytes),
    (r"failed to allocate memory", lambda _: "memory"),
    (r"CUDNN failed to allocate the scratch space|CUDNN_STATUS_ALLOC_FAILED", lambda _: "memory for cuDNN's workspace"),
    (r"CUBLAS_STATUS_ALLOC_FAILED", lambda _: "memory for cuBLAS's workspace"),
    (r"CUDA_ERROR_OUT_OF_MEMORY", lambda _: "memory of CUDA itself, beside what TensorFlow holds"),
    (r"Dst tensor is not initialized", lambda _: "memory for a copy to the GPU"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, the device's or the host's."""
    if isinstance(error, tf.errors.ResourceExhaustedError | MemoryError):
        return True
    text = str(error)
    said = any(words in text.lower() for words in _LACK) or any(re.search(form, text) for form, _ in _FORMS)
    return isinstance(error, tf.errors.OpError) and said


def _request(error: tf.errors.OpError) -> _Request | None:
    """What an error says; None if it is not about the memory of the device that trains."""
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    on_host = re.search(r"device:CPU:\d+ by allocator", text) and tf.config.list_logical_devices("GPU")
    what = next((describe(found) for form, describe in _FORMS if (found := re.search(form, text))), None)
    if on_host or not is_out_of_memory(error):
        return None
    node = re.search(r"\{\{node ([^}]+)\}\}", text) or re.search(r"\[Op:(?!__)(\w+)\]", text)
    gpu = re.search(r"GPU[:_](\d+)|device ordinal (\d+)", text)
    return _Request(
        what or f"memory ({summarize_error(error)})", node and node[1], int(gpu[1] or gpu[2]) if gpu else None
    )


def _explained(model: keras.Model, request: _Request, call: _Call) -> str | None:
    """The explanation; None if it fails or is interrupted."""
    warn_once(
        f"explained_errors {request}",
        f"Out of memory: {_who(request, {})} asked for {request.what}. tfopt.memory.explained_errors now estimates "
        "what would help; Ctrl-C shows TensorFlow's error at once.",
    )
    try:
        with _unchanged(model):
            return _explanation(model, request, call)
    except (Exception, KeyboardInterrupt):  # noqa: BLE001  TensorFlow's error is raised instead
        return None


@contextmanager
def _unchanged(model: keras.Model) -> Iterator[None]:
    """Sets traced step functions aside, so that nothing rebuilds them, and puts them back."""
    models = [part for part in model._flatten_layers() if isinstance(part, keras.Model)]
    before = [(part, name, getattr(part, name)) for part in models for name in STEP_FUNCTIONS]
    try:
        for part, name, _ in before:
            setattr(part, name, None)
        yield
    finally:
        for part, name, function in before:
            setattr(part, name, function)


def _explanation(model: keras.Model, request: _Request, call: _Call) -> str:
    step = _ENTRIES[call.name]
    gpu = next((one for one in usage() if one.index == (request.gpu or 0)), None)
    estimated = _estimated(model, call) if step == _TRAINING else _Estimated({})
    takes, room = estimated.takes, _room(estimated.takes, gpu)
    parts = [
        f"Expected {step} that fits into the memory of {f'GPU:{gpu.index}' if gpu else 'the device'}. Found: "
        f"{_who(request, estimated.scopes)} asked for {request.what}, and not that much was left."
    ]
    if gpu is not None:
        parts.append(f"{gpu}.")
    if takes is not None:
        parts.append("\n\n".join(str(takes).split("\n\n")[:2]))  # without the layers
    if takes is not None and room is not None and takes.total_mib <= room:
        parts.append(_GAPS)
    if estimated.failure:
        parts.append(f"The step could not be estimated, so there are no figures: {estimated.failure}.")
    if step == _TRAINING:
        parts.append(_listed(remedies(model, estimated.batch, takes, room), room))
        parts.append(_LOST if model.jit_compile else _HALF_DONE)
    else:
        parts.append(_listed([Remedy(_SMALLER)], room))
    return "\n\n".join(map(wrapped, parts))


class _Estimated(NamedTuple):
    """The scopes of layers, a batch of the training and what a step takes, or why that is unknown."""

    scopes: Mapping[str, str]
    batch: Any = None
    takes: MemoryEstimate | None = None
    failure: str = ""


def _estimated(model: keras.Model, call: _Call) -> _Estimated:
    with scopes_recorded(model) as scopes:
        try:
            batch = _batch(call)
            return _Estimated(scopes, batch, estimate(model, batch))
        except Exception as error:  # noqa: BLE001  there are remedies without figures
            return _Estimated(scopes, failure=summarize_error(error))


def _listed(found: list[Remedy], room: float | None) -> str:
    """The remedies with their figures, and a mark on those with which the step fits."""
    figures = [f"{figure(one.mib)} MiB{', fits' * one.fits(room)}" if one.mib is not None else "" for one in found]
    head = ", and what the step would then take" if any(figures) else ""
    head += f" (there is room for {figure(room)} MiB)" if room is not None else ""
    rows = [(f"{number}.", mib, one.text) for number, (one, mib) in enumerate(zip(found, figures, strict=True), 1)]
    return "\n".join([f"What to do{head}:", *described(rows)])


def _who(request: _Request, scopes: Mapping[str, str]) -> str:
    if request.node is None:
        return "the step"
    if request.node.endswith("PartitionedCall"):
        return "the step's XLA program"
    layer = layer_of(request.node, scopes)
    return f"layer {layer!r} (operation {request.node})" if layer else f"operation {request.node}"


def _room(takes: MemoryEstimate | None, gpu: MemoryUsage | None) -> float | None:
    """MiB that a step may take on a GPU; None if unknown."""
    room = room_mib(gpu, takes.model_mib) if takes and gpu else None
    return room and max(0.0, (1 - _SPARE_SHARE) * room)


def _batch(call: _Call) -> Any:
    """The specs of the batches that a call trains on, or arrays like them; an open size if one is not known."""
    x = call.arguments.get("x")
    if isinstance(x, tf.data.Dataset):
        size = _batch_size(x)
        return tf.nest.map_structure(
            lambda spec: tf.TensorSpec([spec.shape[0] or size, *spec.shape[1:]], spec.dtype), x.element_spec
        )
    if isinstance(x, keras.utils.PyDataset):
        return x[0]
    parts = (x, call.arguments.get("y"), call.arguments.get("sample_weight"))
    given = tuple(part for part in parts if part is not None)
    if call.name == "train_on_batch":
        return given
    size = call.arguments.get("batch_size") or 32  # Keras' default

    def one_batch(part: Any) -> Any:
        if isinstance(part, tf.Tensor):
            return tf.TensorSpec([min(size, part.shape[0]), *part.shape[1:]], part.dtype)
        array = np.asarray(part)
        if not array.ndim:
            raise UnsupportedError(f"batches of a {type(part).__name__} are of unknown size")
        return np.broadcast_to(np.zeros((), array.dtype), (min(size, len(array)), *array.shape[1:]))

    return tf.nest.map_structure(one_batch, given)


def _batch_size(dataset: Any) -> int | None:
    """What a dataset's last `batch` was given."""
    while getattr(dataset, "_batch_size", None) is None:
        if not dataset._inputs():
            return None
        dataset = dataset._inputs()[0]
    return int(tf.get_static_value(dataset._batch_size))
