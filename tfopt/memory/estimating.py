"""Estimates the device memory that a training step takes, before anything runs."""

import collections
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.errors import TfoptError, UnsupportedError, summarize_error
from tfopt.files import write_atomic
from tfopt.memory.compiled_buffers import peak_of_compiled
from tfopt.memory.graph_peak import peak_of_graph
from tfopt.memory.peak import Peak, Phases, layer_of, scopes_recorded
from tfopt.model.batches import specs_of, steps_per_launch
from tfopt.model.layers import require_compiled
from tfopt.model.state import optimizer_names, optimizers_of, trace_train_step
from tfopt.model.undoing import only_looks
from tfopt.page import Bar, Page, Section, Table, bar_chart, render
from tfopt.text import Shown, aligned, figure, percent, wrapped

_MIB = 2**20
_LAYERS_SHOWN = 10
_LEAST_SHARE = 0.001  # of the total, for a layer to be shown
_PARTS = ("weights", "optimizer", "batch", "activations", "gradients", "workspace")
_LEAVES = np.ndarray | tf.Tensor | tf.TensorSpec | keras.KerasTensor
_MOST_EXAMPLES = 2**24  # in a larger batch TensorFlow's sizes may overflow
_CLOSE_SHARE = 0.01  # of a batch: how near to the largest one a search ends


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """What one layer's forward pass keeps for the backward pass."""

    path: str | None
    """The layer's path; None for what is kept outside all layers, such as by the loss."""
    mib: float


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryEstimate(Shown):
    """The device memory that a training step takes at its peak, in MiB.

    It keeps the model, for `total_mib_at` and `largest_batch`.
    """

    weights_mib: float
    """All variables but the optimizer's: weights, statistics, metrics and seeds."""
    optimizer_mib: float
    """The optimizer's variables: moments, accumulated gradients."""
    batch_mib: float
    """The batch, once, or those of a launch of several steps; a pipeline that prefetches to the device holds more."""
    activations_mib: float
    """What the forward pass keeps for the backward pass, 16-bit copies of weights included."""
    gradients_mib: float
    """Gradients that wait for the optimizer at that moment. Most are gone by then, or not made yet."""
    workspace_mib: float
    """The rest: temporaries, constants, results, and gaps between them."""
    by_layer: tuple[LayerMemory, ...]
    """`activations_mib` by layer, the largest first."""
    batch_size: int
    """Examples in the batch."""
    source: str
    """Where the figures come from: "XLA's buffer assignment", or "the step's graph" for a model without XLA."""
    total_mib_at: Callable[[int], float] = field(compare=False)
    """Returns the total for another batch size, for which the model is traced, and under XLA compiled."""

    @property
    def total_mib(self) -> float:
        """All of it."""
        return sum(mib for _, mib in self._parts())

    @property
    def model_mib(self) -> float:
        """What the model takes between steps: `weights_mib` and `optimizer_mib`."""
        return self.weights_mib + self.optimizer_mib

    def largest_batch(self, limit_mib: float) -> int:
        """Returns the most examples whose step takes at most `limit_mib`; 0 if not even one fits.

        The model is traced, and under XLA compiled, for about four other batch sizes, as what it takes is not quite a
        straight line: below a certain size the update takes most, and XLA fuses differently. The result is itself
        estimated to fit, and within 1 % of the largest that does, or the very largest below 200; at most 2²⁴.

        Args:
            limit_mib: MiB, such as what `tfopt.memory.usage` reports as free. Leave a tenth for the allocator.

        Raises:
            ValueError: If `limit_mib` is not a finite number above 0.
            tfopt.errors.UnsupportedError: If the model takes no other batch size.

        Example:
            >>> tfopt.memory.estimate(model, batch).largest_batch(limit_mib=16_000)
            416
        """
        limit = checks.number("limit_mib", limit_mib, "Give the MiB that a step may take.", above=0)
        totals = {0: self.model_mib, self.batch_size: self.total_mib}
        stride = 1
        while totals[0] <= limit:
            fitting = max(size for size, total in totals.items() if total <= limit)
            beyond = min((size for size, total in totals.items() if total > limit), default=None)
            close = max(1, int(fitting * _CLOSE_SHARE))
            low, high = sorted(totals)[-2:] if beyond is None else (fitting, beyond)
            if beyond is None:  # farther each time, as small batches may all take the same
                size = max(_guess(totals, low, high, limit), fitting + stride * close)
                stride *= 4
            elif beyond - fitting <= close:
                return fitting
            elif len(totals) % 2:  # every other time, as straight lines may close in from one side only
                size = (fitting + beyond) // 2
            else:
                size = min(_guess(totals, low, high, limit), beyond - close)
            if fitting >= _MOST_EXAMPLES:
                return fitting
            size = min(max(size, fitting + close), max(_MOST_EXAMPLES, self.batch_size))
            totals[size] = self.total_mib_at(size)
        return 0

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        names = ("batch_size", "source", "total_mib", *(f"{name}_mib" for name in _PARTS))
        return {name: getattr(self, name) for name in names} | {"by_layer": [asdict(layer) for layer in self.by_layer]}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as a self-contained HTML page with charts, and returns the page's path.

        Raises:
            tfopt.errors.UnsupportedError: If jinja2 is not installed.
            OSError: If the file cannot be written.
        """
        write_atomic(path, self._page())
        return Path(path)

    def __str__(self) -> str:
        large = [layer for layer in self.by_layer if layer.mib >= _LEAST_SHARE * self.total_mib]
        shown = large[:_LAYERS_SHOWN]
        rest = self.by_layer[len(shown) :]
        layers = [(_named(layer), layer.mib) for layer in shown]
        if rest:
            layers.append((f"{len(rest)} more", sum(layer.mib for layer in rest)))
        tables = ["\n".join(self._rows([*self._parts(), ("in all", self.total_mib)]))]
        if layers:
            tables.append("\n".join(["Activations by layer:", *self._rows(layers)]))
        return "\n\n".join([wrapped(self._lead()), *tables])

    def _parts(self) -> list[tuple[str, float]]:
        return [(name, getattr(self, f"{name}_mib")) for name in _PARTS]

    def _rows(self, parts: list[tuple[str, float]]) -> list[str]:
        longest = 50  # columns, so that figures stay on the line
        rows = [(name if len(name) <= longest else f"…{name[1 - longest :]}", mib) for name, mib in parts]
        return aligned([(name, f"{mib:,.1f} MiB", self._share(mib)) for name, mib in rows], texts=1)

    def _share(self, mib: float) -> str:
        return percent(round(mib / self.total_mib, 3))

    def _lead(self) -> str:
        return f"A training step on {self.batch_size} examples takes {self.total_mib:,.1f} MiB, by {self.source}."

    def _page(self) -> str:
        parts = [self._bar(name, mib) for name, mib in self._parts()]
        layers = [self._bar(_named(layer), layer.mib) for layer in self.by_layer[:_LAYERS_SHOWN]]
        charts = [
            bar_chart(parts, title="At the peak of a step", description="MiB, when the step takes most."),
            *([bar_chart(layers, title="Activations by layer", description="The largest, in MiB.")] if layers else []),
        ]
        rows = [(_named(layer), f"{layer.mib:,.2f}", self._share(layer.mib)) for layer in self.by_layer]
        table = Table(("Layer", "MiB", "Of all"), rows, align="lrr")
        return render(
            Page(
                title="Memory of a training step",
                lead=self._lead(),
                sections=[Section("Where it goes", charts=charts, details=[("All layers", table)] if rows else [])],
                figures=[("In all", figure(self.total_mib), "MiB"), ("Batch", str(self.batch_size), "examples")],
            )
        )

    def _bar(self, name: str, mib: float) -> Bar:
        return Bar(name, mib, f"{mib:,.1f} MiB, {self._share(mib)}", tone="plain", meaning="MiB at the peak")


@only_looks
def estimate(model: keras.Model, batch: Any) -> MemoryEstimate:
    """Estimates the device memory a training step takes, by part and layer, without running it.

    Use it to choose a batch size, or the layers whose activations to recompute. The step is traced. If the model trains
    under XLA, it is compiled for this machine's device, and the figures are those of the compiler's buffer assignment.
    Otherwise they are the sizes of the tensors in use at the same time, if each operation of the step's graph runs as
    soon as it can: on nets measured on a CPU, from 5 % too low to 15 % too high. What TensorFlow's allocator loses
    between tensors, and what convolutions and cuDNN take while they run, is not known. The model comes back unchanged,
    except that its optimizer and metrics are built.

    Args:
        model: A compiled model whose layers are built.
        batch: One batch (x, y[, sample_weight]) as `fit` takes it, or its specs: tf.TensorSpec or keras.KerasTensor in
            place of arrays. Only shapes and dtypes are looked at.

    Returns:
        The parts in MiB, which add up to the total.

    Raises:
        TypeError: If `model` is not a Keras model, or `batch` not a batch.
        ValueError: If the model is not compiled or built, or cannot train on such a batch, or if a size of a spec is
            None.
        tfopt.errors.UnsupportedError: If the model runs eagerly or on several replicas, or XLA is on and cannot compile
            the step.

    Example:
        >>> print(tfopt.memory.estimate(model, (images, labels)))
        A training step on 64 examples takes 61.6 MiB, by XLA's buffer assignment.
        …
    """
    require_compiled(model)
    _require_graph(model)
    return _estimate(model, _specs(batch))


def _estimate(model: keras.Model, specs: Any) -> MemoryEstimate:
    with scopes_recorded(model) as scopes:
        step, graph = _traced(model, specs)
        optimizers = optimizers_of(model, inner=False)
        phases = Phases(optimizer_names(optimizers))
        peak = _compiled(model, step, phases) if model.jit_compile else None
    by_xla = peak is not None
    if peak is None:
        peak = peak_of_graph(graph, phases)
    slots = {id(slot.value): slot.value for one in optimizers for slot in one.variables}
    variables = {id(one.value): one.value for one in (*model.variables, *model.metrics_variables)}
    variables |= {id(one): one for one in graph.variables}
    flat = [spec for spec in tf.nest.flatten(specs) if spec is not None]
    captured = [inside for _, inside in graph.captures if inside.dtype != tf.resource]
    by_layer = _by_layer(peak, scopes)
    activations = sum(layer.mib for layer in by_layer)
    gradients = peak.gradients / _MIB
    return MemoryEstimate(
        weights_mib=size_mib(one for key, one in variables.items() if key not in slots),
        optimizer_mib=size_mib(slots.values()),
        batch_mib=steps_per_launch(model) * size_mib(flat),
        activations_mib=activations,
        gradients_mib=gradients,
        workspace_mib=peak.total / _MIB + size_mib(captured) - activations - gradients,
        by_layer=by_layer,
        batch_size=_examples(specs),
        source="XLA's buffer assignment" if by_xla else "the step's graph",
        total_mib_at=lambda size: _total_mib_at(model, specs, size),
    )


def _traced(model: keras.Model, specs: Any) -> tuple[Callable[..., Any], tf.Graph]:
    """The step and its graph."""
    try:
        return trace_train_step(model, specs)
    except TfoptError:  # such as recomputation that would differ
        raise
    except Exception as error:
        raise ValueError(
            f"Expected a batch that {model.name!r} can train on. Received: {specs_of(specs)}, which fails: "
            f"{summarize_error(error)}. Pass a batch (x, y[, sample_weight]) as fit takes it, or its specs."
        ) from error


def _compiled(model: keras.Model, step: Any, phases: Phases) -> Peak | None:
    try:
        return peak_of_compiled(step, phases)
    except (ValueError, tf.errors.OpError) as error:
        raise UnsupportedError(
            f"Expected a step that XLA compiles, as {model.name!r} trains under it. Found: {summarize_error(error)}. "
            "tfopt.xla.explain(model) says what stands in its way; without it, compile with jit_compile=False."
        ) from error


def _total_mib_at(model: keras.Model, specs: Any, size: int) -> float:
    """The total in MiB for a batch like this one of another size."""
    given = _examples(specs)

    def resized(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        if spec is None or not spec.shape.rank or spec.shape[0] != given:
            return spec
        return tf.TensorSpec([size, *spec.shape[1:]], spec.dtype)

    try:
        return _estimate(model, tf.nest.map_structure(resized, specs)).total_mib
    except ValueError as error:
        raise UnsupportedError(
            f"Expected a model that takes batches of any size. Found: {model.name!r} takes {given} examples, but not "
            f"{size}. Leave the batch size out of its Input layers and reshapes."
        ) from error


def _guess(totals: Mapping[int, float], low: int, high: int, limit: float) -> int:
    """The batch size that takes the limit, on the straight line through two known ones."""
    growth = totals[high] - totals[low]
    return int(low + (limit - totals[low]) * (high - low) / growth) if growth > 0 else high


def _require_graph(model: keras.Model) -> None:
    own_step = type(model).train_step is not keras.Model.train_step
    if not model.built and not own_step:  # a model with its own step may never be called itself
        raise ValueError(
            f"Expected a built model, whose weights exist. Received: {model.name!r}, which is not built. Call it on a "
            "batch first: model(x)."
        )
    if model.run_eagerly:
        raise UnsupportedError(
            f"Expected a model that trains in a graph, which tells sizes. Found: {model.name!r} with "
            "run_eagerly=True. Compile it with run_eagerly=False."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise UnsupportedError(
            f"Expected a model on one device. Found: {model.name!r} trains on {replicas} replicas. Build it outside "
            "the strategy's scope, and estimate it for one replica's part of the batch."
        )


def _specs(batch: Any) -> Any:
    """The specs of a batch, or of specs; raises if it is neither, or if a size is open."""
    while isinstance(batch, tuple) and batch and batch[-1] is None:  # no sample weights
        batch = batch[:-1]
    empty = isinstance(batch, tuple | dict) and not batch
    if empty or not isinstance(batch, tuple | dict | _LEAVES):
        raise TypeError(
            "Expected one batch of data as fit takes it, (x, y[, sample_weight]), or its specs. Received: "
            f"{batch!r} of type {type(batch).__name__}. Pass one batch of data, not its size or a dataset: "
            "next(iter(dataset))."
        )
    specs = _as_specs(batch)
    if not all(spec.shape.is_fully_defined() for spec in tf.nest.flatten(specs) if spec is not None):
        raise ValueError(
            f"Expected a batch whose sizes are all known. Received: {specs}. Give specs with the batch "
            "size in place of None, such as dataset.element_spec of batches with drop_remainder=True."
        )
    _examples(specs)
    return specs


def _as_specs(value: Any) -> Any:
    """Specs of arrays, tensors and symbolic tensors; lists as tuples, and NumPy floats as Keras' floatx, as in fit."""
    if isinstance(value, dict):
        return {key: _as_specs(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_as_specs(part) for part in value)
    if value is None:
        return None
    if not isinstance(value, _LEAVES):
        raise TypeError(
            f"Expected arrays, tensors or specs in a batch. Received: {value!r} of type {type(value).__name__}. "
            "Convert it with np.asarray, and ragged or sparse tensors to dense ones."
        )
    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return tf.TensorSpec(value.shape, keras.config.floatx() if is_float else value.dtype)


def _examples(specs: Any) -> int:
    first = next((spec for spec in tf.nest.flatten(specs) if spec is not None), None)
    if first is None or not first.shape.rank or not first.shape[0]:
        raise ValueError(
            f"Expected a batch of at least one example. Received: {specs_of(specs)}. Pass arrays whose first axis is "
            "the batch."
        )
    return int(first.shape[0])


def _by_layer(peak: Peak, scopes: Mapping[str, str]) -> tuple[LayerMemory, ...]:
    found: collections.Counter[str | None] = collections.Counter()
    for names, size in peak.activations.items():
        found[next(filter(None, (layer_of(name, scopes) for name in names)), None)] += size
    return tuple(LayerMemory(path, size / _MIB) for path, size in found.most_common())


def size_mib(parts: Iterable[Any]) -> float:
    """MiB of variables, tensors or specs."""
    return float(sum(part.shape.num_elements() * part.dtype.size for part in parts)) / _MIB


def _named(layer: LayerMemory) -> str:
    return layer.path or "outside layers"
