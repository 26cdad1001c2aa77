"""`suggest`: cheaper forms of a model's costliest layers, measured on the spot."""

import math
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from functools import partial, singledispatch
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.compress.costing import cost_and_calls, reason
from tfopt.errors import UnsupportedError
from tfopt.measure import Comparison, compare, interleave
from tfopt.measure.layer_steps import BlockTimer, outputs, outputs_and_gradients
from tfopt.model.batches import Data
from tfopt.model.layers import is_keras_own, output_layers
from tfopt.model.state import python_random_kept
from tfopt.model.step_calls import StepCall, kind_of
from tfopt.model.undoing import only_looks
from tfopt.text import Shown, aligned, figure, percent, wrapped

_LAYERS = keras.layers
_TURNS = 6
_GROUPS = 4
_NARROWER = 4  # times fewer channels in the middle of a bottleneck
_SMALLER = 2  # times fewer parameters in a low-rank form
_MULTIPLE = 8  # of sizes that Tensor Cores take in 16 bits
_SHARED_HEADS = 4  # query heads to a key head


@dataclass(frozen=True, slots=True, kw_only=True)
class CheaperForm:
    """Another form of a layer. Inputs and outputs keep their shapes, unless the form is a smaller size."""

    path: str
    """The layer."""
    alike: int
    """How many other calls in the model are identical, and would gain as much."""
    form: str
    """What the layer would become."""
    comparison: Comparison
    """Its speed over the layer's, forward and backward, on the inputs of the training step."""
    ms: tuple[float, float]
    """Milliseconds forward and backward, of the layer and of this form."""
    parameters: tuple[int, int]
    """Of the layer, and of this form."""
    error: float | None
    """How far its outputs are from the layer's before any training: the norm of the difference over that of the layer's
    outputs. None if it does not start from the layer's weights, or the outputs are not finite."""
    retrain: str
    """What of the model must be trained again."""

    @property
    def pays(self) -> bool:
        """Whether it is faster here, beyond the noise."""
        return self.comparison.verdict == "faster"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Suggestions(Shown):
    """Cheaper forms of a model's costliest layers, as `suggest` measured them. Its `str` is a table."""

    model: str
    """Name of the model."""
    forms: tuple[CheaperForm, ...]
    """Grouped by layer, costliest layer first; within a layer, fastest form first."""
    without: tuple[str, ...]
    """Layers just as costly that have no known cheaper form, or do not run alone."""
    not_running: tuple[str, ...] = ()
    """Forms that do not run here, each with its layer and the reason."""

    @property
    def verdict(self) -> str:
        """The form that pays most, in a sentence."""
        paying = [form for form in self.forms if form.pays]
        if not paying:
            return f"No cheaper form of the costliest layers of {self.model} is faster here."
        best = max(paying, key=lambda form: (form.ms[0] - form.ms[1]) * (1 + form.alike))
        alike = f", and as much in {best.alike} more" if best.alike else ""
        return f"{best.path} as {best.form} saves {figure(best.ms[0] - best.ms[1])} ms a step{alike}; {best.retrain}."

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        forms = [asdict(form) | {"comparison": form.comparison.to_dict(), "pays": form.pays} for form in self.forms]
        return asdict(self) | {"forms": forms, "verdict": self.verdict}

    def __str__(self) -> str:
        rows = [("layer", "form", "ms", "speed here", "parameters", "off by")]
        rows += [
            (
                form.path + (f" and {form.alike} alike" if form.alike else ""),
                form.form,
                f"{figure(form.ms[0])} → {figure(form.ms[1])}",
                f"{form.comparison.ratio:.2f}×{'' if form.pays else ', ' + form.comparison.verdict}",
                f"{form.parameters[0]:,} → {form.parameters[1]:,}",
                "" if form.error is None else percent(form.error),
            )
            for form in self.forms
        ]
        lines = [wrapped(self.verdict), *(aligned(rows, texts=2) if self.forms else [])]
        if any(form.error is not None for form in self.forms):
            lines.append(wrapped("Off by: how far the form's outputs are from the layer's before it is trained."))
        if self.without:
            lines.append(wrapped(f"No cheaper form is known of: {', '.join(self.without)}."))
        lines += [wrapped(f"Does not run here: {form}.") for form in self.not_running]
        return "\n".join(lines)


@only_looks
def suggest(model: keras.Model, batch: Data, layers: int = 3) -> Suggestions:
    """Measures cheaper forms of the layers that take most of a training step.

    Each form runs forward and backward on the inputs that the layer has in the step, in turn with the layer, compiled
    as the model is. Fewer FLOPs are often not faster; the table also lists forms that are slower here. The model stays
    as it is. Only training shows which form keeps the quality.

    It tries, for convolutions, a separable one (Chollet, "Xception", 2017), groups (Xie et al., "ResNeXt", 2017), a
    bottleneck of 1×1 convolutions (He et al., "ResNet", 2016), and two of low rank by singular values (Denton et al.,
    2014); for dense layers, two of low rank; for attention, key heads that several query heads share (Ainslie et al.,
    "GQA", 2023); and, for convolutions and dense layers whose number of
    outputs is not a multiple of 8, the next smaller multiple.

    Args:
        model: A compiled model; it is built if it is not.
        batch: As for `cost`.
        layers: How many layers with a cheaper form to try; identical layers count as one.

    Returns:
        The forms, each with its time, its parameters and what must be trained again.

    Raises:
        TypeError, ValueError, tfopt.errors.PipelineError, tfopt.errors.UnsupportedError: As for `cost`, or if `layers`
            is not an integer of at least 1.

    Example:
        >>> print(tfopt.compress.suggest(model, dataset))
        conv2 as a separable convolution saves 9.81 ms a step; train it and what follows from scratch.
        …
    """
    checks.integer("layers", layers, "Give the number of layers to try.", least=1)
    cost, calls = cost_and_calls(model, batch)
    kinds = [kind_of(call.layer, [call]) for call in calls]
    alike = {kind: [place for place, other in enumerate(kinds) if other == kind] for kind in kinds}
    costly = sorted(alike.values(), key=lambda places: sum(cost.layers[at].ms or 0 for at in places), reverse=True)
    last = _output_layers(model, calls)
    forms: list[CheaperForm] = []
    without: list[str] = []
    not_running: list[str] = []
    with python_random_kept():
        for place, *others in costly:
            call, path = calls[place], cost.layers[place].path
            known = _forms_of(call, last) if cost.layers[place].ms else []
            found = []
            for form in known:
                try:
                    found.append(_measured(model, call, path, len(others), form))
                except Exception as error:  # noqa: BLE001 - a form may lack a kernel on this device, or memory
                    not_running.append(f"{path} as {form.name} ({reason(error)})")
            forms += sorted(found, key=lambda form: form.comparison.ratio, reverse=True)
            layers -= bool(known)
            if not layers:
                break
            if not known:
                without.append(path)
    return Suggestions(model=model.name, forms=tuple(forms), without=tuple(without), not_running=tuple(not_running))


def _output_layers(model: keras.Model, calls: list[StepCall]) -> Collection[keras.Layer]:
    """Returns the layers that make a model's outputs; all of them if these cannot be found."""
    try:
        return output_layers(model)
    except UnsupportedError:
        return [call.layer for call in calls]


class _Form(NamedTuple):
    """A form before it is measured."""

    name: str
    layer: keras.Layer
    retrain: str = "train it and what follows from scratch"
    smaller: bool = False  # whether it has fewer outputs
    start: Any = None  # a function that sets the weights of the built layer from those of the one it stands for


def _forms_of(call: StepCall, last: Collection[keras.Layer]) -> list[_Form]:
    """Returns the forms of a layer; of those in `last`, which make the model's outputs, none with fewer of them."""
    if not is_keras_own(call.layer):
        return []
    shapes = [tuple(tensor.shape) for tensor in call.tensors]
    return [form for form in _forms(call.layer, shapes) if not (form.smaller and call.layer in last)]


@singledispatch
def _forms(layer: keras.Layer, shapes: list[tuple[int, ...]]) -> Iterator[_Form]:
    yield from ()


@_forms.register(_LAYERS.Conv1D)
@_forms.register(_LAYERS.Conv2D)
def _of_convolution(layer: Any, shapes: list[tuple[int, ...]]) -> Iterator[_Form]:
    channels = shapes[0][1 if layer.data_format == "channels_first" else -1]
    kind, rank = type(layer), layer.rank
    how = {name: getattr(layer, name) for name in ("strides", "padding", "data_format", "dilation_rate")}
    last = {"activation": layer.activation, "use_bias": layer.use_bias, "dtype": layer.dtype_policy}
    plain = {"data_format": layer.data_format, "dtype": layer.dtype_policy}
    large = max(layer.kernel_size) > 1
    if layer.groups > 1 or layer.padding == "causal":
        return
    if large and max(layer.strides) == min(layer.strides) and channels > 1:
        separable = {1: _LAYERS.SeparableConv1D, 2: _LAYERS.SeparableConv2D}[rank]
        yield _Form("a separable convolution", separable(layer.filters, layer.kernel_size, **how, **last))
    if channels % _GROUPS == layer.filters % _GROUPS == 0 and channels > _GROUPS:
        yield _Form(f"{_GROUPS} groups", kind(layer.filters, layer.kernel_size, groups=_GROUPS, **how, **last))
    middle = min(channels, layer.filters) // _NARROWER
    if large and middle:
        inner = [
            kind(middle, 1, use_bias=False, **plain),
            kind(middle, layer.kernel_size, use_bias=False, **how, dtype=layer.dtype_policy),
            kind(layer.filters, 1, **plain, **{name: last[name] for name in ("activation", "use_bias")}),
        ]
        yield _Form(f"a bottleneck of {middle} channels", keras.Sequential(inner))
    size = int(np.prod(layer.kernel_size)) * channels
    if (kept := _kept_rank(size, layer.filters)) and layer.quantization_mode is None:
        inner = [
            kind(kept, layer.kernel_size, use_bias=False, **how, dtype=layer.dtype_policy),
            kind(layer.filters, 1, **plain, **{name: last[name] for name in ("activation", "use_bias")}),
        ]
        yield _low_rank(keras.Sequential(inner), kept)
    yield from _fitting(layer, "filters", "output channels")


@_forms.register(_LAYERS.Dense)
def _of_dense(layer: Any, shapes: list[tuple[int, ...]]) -> Iterator[_Form]:
    kept = _kept_rank(shapes[0][-1], layer.units)
    if kept and layer.quantization_mode is None:
        first = _LAYERS.Dense(kept, use_bias=False, dtype=layer.dtype_policy)
        second = _LAYERS.Dense(
            layer.units, activation=layer.activation, use_bias=layer.use_bias, dtype=layer.dtype_policy
        )
        yield _low_rank(keras.Sequential([first, second]), kept)
    yield from _fitting(layer, "units", "outputs")


@_forms.register(_LAYERS.MultiHeadAttention)
def _of_attention(layer: Any, shapes: list[tuple[int, ...]]) -> Iterator[_Form]:
    heads = layer.num_heads
    alike = layer.key_dim == layer.value_dim and layer._output_shape is None and len(shapes[0]) == 3
    options = layer.get_config()  # of Keras 3.14: a gate and a window
    if heads % _SHARED_HEADS or not alike or options.get("sliding_window") is not None:
        return
    gate = {"use_gate": True} if options.get("use_gate") else {}
    grouped = _LAYERS.GroupQueryAttention(
        layer.key_dim,
        heads,
        heads // _SHARED_HEADS,
        dropout=layer._dropout,
        use_bias=layer._use_bias,
        dtype=layer.dtype_policy,
        **gate,
    )
    retrain = "train it and what follows on, from the means of the key and value heads"
    yield _Form(f"{heads // _SHARED_HEADS} key heads for {heads} query heads", grouped, retrain)


def _fitting(layer: Any, name: str, what: str) -> Iterator[_Form]:
    """The layer with fewer outputs, if their number misses the multiple that Tensor Cores take in 16 bits."""
    size = getattr(layer, name)
    smaller = size // _MULTIPLE * _MULTIPLE
    if smaller and smaller != size:
        config = layer.get_config() | {name: smaller, "name": None}
        retrain = f"train it and what follows from scratch; the next layers take {smaller:,}"
        yield _Form(f"{smaller:,} {what}", type(layer).from_config(config), retrain, smaller=True)


def _kept_rank(rows: int, columns: int) -> int:
    """Returns the rank at which two factors have half of the parameters of a matrix; 0 if that is no rank."""
    return rows * columns // _SMALLER // (rows + columns)


def _low_rank(layer: keras.Sequential, rank: int) -> _Form:
    return _Form(
        f"two of rank {rank}", layer, "train the model on, from the layer's own weights", start=_from_singular_values
    )


def _from_singular_values(old: Any, new: keras.Sequential) -> None:
    """Sets the weights of two layers to the best approximation of one layer's matrix."""
    first, second = new.layers
    kernel = keras.ops.convert_to_numpy(old.kernel).astype("float64")
    rows = kernel.reshape(-1, kernel.shape[-1])
    left, values, right = np.linalg.svd(rows, full_matrices=False)
    rank = first.kernel.shape[-1]
    root = np.sqrt(values[:rank])
    first.kernel.assign((left[:, :rank] * root).reshape(first.kernel.shape))
    second.kernel.assign((root[:, None] * right[:rank]).reshape(second.kernel.shape))
    if old.use_bias:
        second.bias.assign(old.bias)


def _measured(model: keras.Model, call: StepCall, path: str, alike: int, form: _Form) -> CheaperForm:
    other = call._replace(layer=form.layer)
    other.again(call.tensors)  # builds it
    if form.start is not None:
        form.start(call.layer, form.layer)
    inputs = [call.tensors]
    steps = {}
    for name, one in (("now", call), ("form", other)):
        function = tf.function(
            partial(outputs_and_gradients, [one]), autograph=False, jit_compile=bool(model.jit_compile)
        )
        steps[name] = partial(function.get_concrete_function(inputs), inputs)
        steps[name]()
    times = interleave({name: BlockTimer(step) for name, step in steps.items()}, _TURNS)
    return CheaperForm(
        path=path,
        alike=alike,
        form=form.name,
        comparison=compare(times["now"], times["form"]),
        ms=(times["now"].median_ms, times["form"].median_ms),
        parameters=(call.layer.count_params(), form.layer.count_params()),
        error=None if form.start is None else _distance(call, other),
        retrain=form.retrain,
    )


def _distance(call: StepCall, other: StepCall) -> float | None:
    """Returns how far the outputs of one call are from those of another; None if some are not finite."""
    now, form = (tf.cast(outputs([one], [one.tensors])[0], tf.float32) for one in (call, other))
    found = float(tf.norm(form - now) / tf.maximum(tf.norm(now), 1e-30))
    return found if math.isfinite(found) else None
