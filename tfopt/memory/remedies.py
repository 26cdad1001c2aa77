"""What lets a training step take less memory, each with what the step would then take by estimate."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import keras
import tensorflow as tf

from tfopt import hardware
from tfopt.errors import UnsupportedError
from tfopt.kernels import chunk_cross_entropy, use_flash_attention
from tfopt.kernels.replacing import restored
from tfopt.memory.estimating import MemoryEstimate, estimate, size_mib
from tfopt.memory.recomputing import is_recomputed, recompute, undo
from tfopt.model.layers import output_layers
from tfopt.repairs.optimizers import ROUNDS

_WORTHWHILE = 0.99  # of the step's memory: what takes more than this helps nobody
_ATTENTION = keras.layers.MultiHeadAttention | keras.layers.GroupQueryAttention
_OTHERS = 2  # remedies to name beside a smaller batch

_Change: TypeAlias = Callable[[keras.Model], AbstractContextManager[None]]


class Remedy(NamedTuple):
    """A line of code, and what it does."""

    text: str
    mib: float | None = None
    """What the step would then take."""

    def fits(self, room: float | None) -> bool:
        """Whether the step would then fit, as far as that is known."""
        return self.mib is not None and room is not None and self.mib <= room


def remedies(model: keras.Model, batch: Any, takes: MemoryEstimate | None, room: float | None) -> list[Remedy]:
    """Two remedies and smaller batches, in order of what they cost the training.

    The two are the first with which the step fits, or else those with which it takes least.
    """
    found: list[Remedy] = []
    for text, change in _changes():
        remedy = _predicted(model, text, change, batch)
        if remedy and (takes is None or remedy.mib is None or remedy.mib < _WORTHWHILE * takes.total_mib):
            found.append(remedy)
        if sum(one.fits(room) for one in found) == _OTHERS:
            break
    best = sorted(found, key=lambda one: 0.0 if one.fits(room) else one.mib or math.inf)[:_OTHERS]
    return [*(one for one in found if one in best), _smaller_batch(model, takes, room)]


def _predicted(model: keras.Model, text: str, change: _Change, batch: Any) -> Remedy | None:
    """A remedy, which is undone again, and its figure if there is a batch; None if the model cannot have it."""
    try:
        with change(model):
            return Remedy(text, None if batch is None else estimate(model, batch).total_mib)
    except (ValueError, UnsupportedError):
        return None
    except Exception:  # noqa: BLE001  it may help all the same
        return Remedy(text)


def _changes() -> Iterator[tuple[str, _Change]]:
    yield "tfopt.kernels.use_flash_attention(model): faster, and the same up to rounding.", _flash
    text = 'tfopt.memory.recompute(model, "activations"): the same up to rounding; runs element-wise functions twice.'
    yield text, partial(_recomputing, layers="activations")
    text = "tfopt.kernels.chunk_cross_entropy(model): the same training without all logits at once, up to 10 % slower."
    yield text, _chunked
    capabilities = [gpu.compute_capability or (0, 0) for gpu in hardware.gpus()]
    if capabilities and min(capabilities) >= (7, 0):  # Tensor Cores
        policy = "mixed_bfloat16" if min(capabilities) >= (8, 0) else "mixed_float16"
        checked = f'tfopt.precision.check(model, data, "{policy}")'
        text = f'tfopt.precision.apply(model, "{policy}"): in 16 bits; first see {checked}.'
        yield text, partial(_in_16_bits, policy=policy)
    yield "tfopt.xla.set_jit(model, True): compiles the step when it first runs.", _under_xla
    yield "tfopt.memory.recompute(model): a step takes up to a third longer.", _recomputing


@contextmanager
def _chunked(model: keras.Model) -> Iterator[None]:
    with restored(model):
        # Of others chunk_cross_entropy would say that it does nothing.
        language_model = isinstance(model.loss, keras.losses.SparseCategoricalCrossentropy)
        _require(language_model and chunk_cross_entropy(model))
        yield


@contextmanager
def _flash(model: keras.Model) -> Iterator[None]:
    with restored(model):
        has_any = any(isinstance(layer, _ATTENTION) for layer in model._flatten_layers())
        _require(model.jit_compile and has_any and use_flash_attention(model))
        yield


@contextmanager
def _in_16_bits(model: keras.Model, policy: str) -> Iterator[None]:
    layers = [one for one in model._flatten_layers() if not isinstance(one, keras.layers.InputLayer)]
    _require(all(layer.compute_dtype == "float32" for layer in layers))
    before = {layer: layer._dtype_policy for layer in layers}
    try:
        for layer in before.keys() - output_layers(model):  # as tfopt.precision.apply leaves those
            layer._dtype_policy = keras.DTypePolicy(policy)
        yield
    finally:
        for layer, own in before.items():
            layer._dtype_policy = own


@contextmanager
def _under_xla(model: keras.Model) -> Iterator[None]:
    _require(not model.jit_compile)
    before, model._jit_compile = model._jit_compile, True
    try:
        yield
    finally:
        model._jit_compile = before


@contextmanager
def _recomputing(model: keras.Model, layers: Literal["auto", "activations"] = "auto") -> Iterator[None]:
    _require(not is_recomputed(model))
    recompute(model, layers)
    try:
        yield
    finally:
        undo(model)


def _require(possible: Any) -> None:
    if not possible:
        raise UnsupportedError("This remedy does not apply, or is on already.")


def _smaller_batch(model: keras.Model, takes: MemoryEstimate | None, room: float | None) -> Remedy:
    """Batches that fit, or else half as large, with as many examples an update as before; it sums their gradients."""
    rounds = getattr(model.optimizer, "__dict__", {}).get(ROUNDS)
    before = rounds.steps if rounds else 1
    if takes is None:
        return Remedy(f"tfopt.batch.accumulate(model, {2 * before}), with batches half the size.")
    if takes.batch_size == 1:
        return Remedy("a smaller model or example, or a device with more memory: the batch cannot be smaller.")
    sums = 0.0 if rounds else _sums_mib(model)  # which the estimate contains
    size, mib = math.ceil(takes.batch_size / 2), None
    with suppress(Exception):  # without a figure
        fitting = 0 if room is None or room <= sums else takes.largest_batch(room - sums)
        steps = math.ceil(takes.batch_size / min(fitting or size, size))
        size = math.ceil(takes.batch_size / steps)
        mib = takes.total_mib_at(size) + sums
    steps = math.ceil(takes.batch_size / size)
    return Remedy(f"tfopt.batch.accumulate(model, {before * steps}), with batches of {size} examples.", mib)


def _sums_mib(model: keras.Model) -> float:
    """What `accumulate` adds: sums of the gradients, in at least 32 bits, and without XLA a copy of them in a step."""
    dtypes = [(weight.shape, keras.backend.result_type(weight.dtype, "float32")) for weight in model.trainable_weights]
    return (1 if model.jit_compile else 2) * size_mib(tf.TensorSpec(shape, dtype) for shape, dtype in dtypes)
