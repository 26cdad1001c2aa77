"""What each layer of a model costs in a training step, as a table, JSON and a page."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tfopt.files import write_atomic
from tfopt.text import Shown, aligned, figure, percent, wrapped

Bound = Literal["products", "memory", "neither"]
_SHOWN = 20
_REACHED = 0.1  # of a ceiling, below which it is not what binds


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One call of a layer in a training step, with everything inside the layer."""

    path: str
    """The layer's path in the model; later calls of a shared layer are numbered: "encoder (2)"."""
    kind: str
    """The layer's class."""
    own: bool
    """Whether the class is the user's own rather than one of Keras'."""
    parameters: int
    """Of the layer, without those that it shares with an earlier row."""
    inputs: tuple[tuple[int | None, ...], ...]
    """Shapes of its input tensors."""
    dtype: str
    """The precision of most of its products, or the layer's own."""
    forward_flops: int
    """Of its matrix products and convolutions; a multiply-add counts as two."""
    backward_flops: int
    unknown: tuple[str, ...]
    """Operations whose FLOPs cannot be counted, each with the reason; the reason alone if it does not run alone."""
    forward_bytes: int
    """The least that must be moved forward: each input, weight and output once. Without the outputs if it does not run
    alone."""
    backward_bytes: int
    """The same backward: inputs, weights and the outputs' gradients read once, and the other gradients written once."""
    forward_ms: float | None
    """Measured alone, on its inputs in the step; None if it does not run alone."""
    backward_ms: float | None
    least_products_ms: float | None
    """Time for its FLOPs at the rate of a large matrix product on this machine; None if these have a dtype, such as
    int8, whose rate is not measured."""
    least_memory_ms: float
    """Time for its bytes at the rate of a large copy on this machine."""
    tensor_cores: str
    """Sizes that do not suit Tensor Cores, each with the next one that does; "" if all do."""

    @property
    def ms(self) -> float | None:
        """Milliseconds forward and backward; None if it does not run alone."""
        return None if self.forward_ms is None else self.forward_ms + (self.backward_ms or 0)

    @property
    def flops(self) -> int:
        """Forward and backward."""
        return self.forward_flops + self.backward_flops

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / max(1, self.forward_bytes + self.backward_bytes)

    @property
    def attained(self) -> float | None:
        """The share of the binding ceiling that it reaches, about 0 to 1; None if it was not timed, or has no rate."""
        if self.ms is None or self.least_products_ms is None:
            return None
        return max(self.least_products_ms, self.least_memory_ms) / self.ms if self.ms else 1.0

    @property
    def bound_by(self) -> Bound | None:
        """The lower of the two ceilings; "neither" if it reaches less than a tenth of that one, as small layers do.

        None if the layer was not timed, or some of its FLOPs or their rate are unknown.
        """
        if self.least_products_ms is None or self.attained is None or self.unknown:
            return None
        if self.attained < _REACHED:
            return "neither"
        return "products" if self.least_products_ms > self.least_memory_ms else "memory"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelCost(Shown):
    """What each layer of a model costs in a training step, as `cost` measured it. Its `str` is a table."""

    model: str
    """Name of the model."""
    batch_size: int
    """Examples in the batch."""
    device: str
    """The GPU, or the CPU if there is none."""
    layers: tuple[LayerCost, ...]
    """One row per call of a layer, in the order of computation."""
    step_ms: float
    """The whole training step, with the loss, the optimizer's update and operations outside of layers."""
    step_flops: int | None
    """Of the matrix products and convolutions in the step's own graph; None if some are unknown."""
    matmul_tflops: dict[str, float]
    """Rate of a large matrix product, by precision; none for integers and float8."""
    copy_gib_per_second: float
    """Rate of a large copy, counting what is read and what is written."""

    @property
    def layers_ms(self) -> float:
        """The sum over all layers, each timed alone."""
        return sum(layer.ms or 0 for layer in self.layers)

    @property
    def rest_ms(self) -> float:
        """The part of the step that no timed layer accounts for; 0 if the layers take longer alone."""
        return max(0.0, self.step_ms - self.layers_ms)

    @property
    def parameters(self) -> int:
        """Of all layers."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def flops(self) -> int:
        """Of all layers' matrix products and convolutions."""
        return sum(layer.flops for layer in self.layers)

    @property
    def costliest(self) -> list[LayerCost]:
        """The layers, slowest first."""
        return sorted(self.layers, key=lambda layer: layer.ms or 0, reverse=True)

    def share(self, layer: LayerCost) -> float:
        """Returns a layer's share, 0 to 1, of the step, or of all layers if these take longer alone."""
        return (layer.ms or 0) / max(self.step_ms, self.layers_ms)

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        derived = ("ms", "intensity", "attained", "bound_by")
        layers = [
            asdict(layer) | {name: getattr(layer, name) for name in derived} | {"share": self.share(layer)}
            for layer in self.layers
        ]
        return asdict(self) | {"layers": layers, "layers_ms": self.layers_ms, "rest_ms": self.rest_ms}

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Writes it as a self-contained HTML page with a roofline chart, and returns the page's path.

        Raises:
            tfopt.errors.UnsupportedError: If jinja2 is not installed.
            OSError: If the file cannot be written.
        """
        from tfopt.compress.roofline import page

        write_atomic(path, page(self))
        return Path(path)

    @property
    def verdict(self) -> str:
        """Where the time goes, in a sentence."""
        step = f"{self.model} at batch size {self.batch_size:,} takes {figure(self.step_ms)} ms a step; "
        first = self.costliest[0]
        if first.ms is None:
            return f"{step}what its layers take of it is unknown, since none of them runs alone."
        places = {
            "products": ", bound by its matrix products",
            "memory": ", bound by moving its tensors",
            "neither": ", bound by neither ceiling: its operations are small, or its kernels slow",
            None: "",
        }
        return f"{step}{first.path} takes {percent(self.share(first))} of it{places[first.bound_by]}."

    def __str__(self) -> str:
        rows = [row[:_IN_TEXT] for row in (HEADS, *(cells(self, layer) for layer in self.costliest[:_SHOWN]))]
        lines = [wrapped(self.verdict), *aligned(rows, texts=2)]
        if len(self.layers) > _SHOWN:
            others = self.costliest[_SHOWN:]
            lines.append(f"  and {len(others):,} more: {figure(sum(layer.ms or 0 for layer in others))} ms")
        return "\n".join([*lines, *(wrapped(remark) for remark in remarks(self))])


HEADS = ("layer", "bound by", "ms", "of step", "MFLOP", "parameters", "forward, backward ms", "MiB", "FLOP/byte")
_IN_TEXT = 6  # columns, as many as lines hold


def cells(cost: ModelCost, layer: LayerCost) -> tuple[str, ...]:
    """Returns a layer's row of the table, under `HEADS`."""
    return (
        f"{layer.path}{'*' * layer.own}",
        "" if layer.bound_by is None else f"{layer.bound_by} {100 * (layer.attained or 0):.0f} %",
        "not alone" if layer.ms is None else figure(layer.ms),
        "" if layer.ms is None else percent(cost.share(layer)),
        "" if layer.ms is None else f"{figure(layer.flops / 1e6)}{'+' * bool(layer.unknown)}",
        f"{layer.parameters:,}",
        "" if layer.forward_ms is None else f"{figure(layer.forward_ms)} + {figure(layer.backward_ms or 0)}",
        "" if layer.ms is None else figure((layer.forward_bytes + layer.backward_bytes) / 2**20),
        "" if layer.ms is None else figure(layer.intensity),
    )


def remarks(cost: ModelCost) -> list[str]:
    """Returns what the table cannot say, a sentence or two each."""
    rates = " and ".join(f"{figure(rate)} TFLOP/s in {dtype}" for dtype, rate in cost.matmul_tflops.items())
    alone = [f"{layer.path} ({'; '.join(layer.unknown)})" for layer in cost.layers if layer.ms is None]
    rest = "the loss, the update and what is in no layer" + (", and the layers that are not timed" if alone else "")
    found = [
        f"{'The timed' if alone else 'All'} layers, each alone: {figure(cost.layers_ms)} ms forward and backward. "
        + (
            f"The rest of the step, {figure(cost.rest_ms)} ms, is {rest}."
            if cost.rest_ms
            else "The whole step takes less: there, neighbours are fused or run at once. Shares are of the sum."
        ),
        f"Ceilings of {cost.device}: {f'large products reach {rates}, ' if rates else ''}large copies "
        f"{figure(cost.copy_gib_per_second)} GiB/s. A layer is bound by the one it is nearer to, and reaches that "
        "share of it.",
    ]
    more = 0 if cost.step_flops is None else cost.step_flops - cost.flops
    if more:
        where = (
            f"more than these layers: in {'layers that are not timed, ' if alone else ''}the loss, the model's own "
            "code, a loop, or a train_step that calls them again"
            if more > 0
            else "less than these layers, since no gradient reaches some of their outputs"
        )
        found.append(f"The step computes {figure(abs(more) / 1e6)} MFLOP {where}.")
    if any(layer.own for layer in cost.layers):
        found.append("* A class that is not Keras', counted in its traced graph.")
    if unknown := [reason for layer in cost.layers if layer.ms is not None for reason in layer.unknown]:
        found.append(f"+ And operations whose FLOPs are unknown: {_few(unknown)}.")
    if alone:
        found.append(f"Not timed, since they do not run outside of the model: {_few(alone)}.")
    if unrated := [f"{layer.path} ({layer.dtype})" for layer in cost.layers if layer.least_products_ms is None]:
        found.append(f"Without a ceiling, since no rate of products in their precision is measured: {_few(unrated)}.")
    if missing := [f"{layer.path} ({layer.tensor_cores})" for layer in cost.costliest if layer.tensor_cores]:
        found.append(f"Sizes that Tensor Cores do not fit: {_few(missing)}.")
    return found


def _few(names: Sequence[str]) -> str:
    shown = "; ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown}; and {len(names) - 4:,} more"
