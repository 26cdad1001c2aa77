"""What an alignment found: as a table and as JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tfopt.text import aligned, listed

_NAMES_LISTED = 3
_RULES = (
    "Multiples after NVIDIA's Matrix Multiplication Background User's Guide, for compute capability 8.0 and later\n"
    "(float8: 8.9); on 7.x only float16 uses Tensor Cores. Other sizes run too, but slower; measure what padding gains."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """A dimension that is no multiple of 16 bytes, in one layer or in several alike.

    Attributes:
        layers: Their paths.
        dimension: What it is to them.
        size: Its size.
        dtype: What they compute in.
        multiple: What the size should be a multiple of.
        next_size: The next such size.
        best_size: The next multiple of 128 bytes, most efficient on A100 and later.
        padding_percent: By how much padding to `next_size` raises the multiply-adds of these layers.
        share_percent: Their part of the model's multiply-adds; None where any size in the model is unknown.
        note: How to pad, or why not to.
    """

    layers: tuple[str, ...]
    dimension: str
    size: int
    dtype: str
    multiple: int
    next_size: int
    best_size: int
    padding_percent: float
    share_percent: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Remark:
    """Layers about which something else is to be said.

    Attributes:
        reason: What.
        layers: Their paths.
    """

    reason: str
    layers: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.reason}: {listed(self.layers, _NAMES_LISTED)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentReport:
    """What `alignment` found. Its `str` is a table.

    Attributes:
        model: The model's name.
        batch_size: The batch size that it was asked for.
        misses: Worst first: those of the layers with most multiply-adds (unknown sizes taken as one).
        below_best: How many other sizes are multiples of 16 bytes and not of 128.
        multiply_adds: Of a forward pass, in the layers whose sizes are known.
        unknown: Layers that could not be judged, or not wholly.
        without_tensor_cores: Layers whose products run elsewhere.
    """

    model: str
    batch_size: int
    misses: tuple[Miss, ...]
    below_best: int
    multiply_adds: int
    unknown: tuple[Remark, ...]
    without_tensor_cores: tuple[Remark, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return asdict(self)

    def __str__(self) -> str:
        found = "sizes that miss Tensor Core multiples" if self.misses else "no size misses a Tensor Core multiple"
        lines = [f"Alignment of {self.model} at batch size {self.batch_size:,}: {found}", *_table(self.misses)]
        lines += dict.fromkeys(f"{miss.dimension} {miss.size:,}: {miss.note}." for miss in self.misses if miss.note)
        if self.below_best:
            lines.append(f"Multiples of 16 bytes, but not of 128, at which A100 and later are best: {self.below_best}.")
        lines += [f"Not judged in full: {remark}" for remark in self.unknown]
        lines += [f"No Tensor Cores: {remark}" for remark in self.without_tensor_cores]
        return "\n".join([*lines, _RULES])


def _table(misses: Iterable[Miss]) -> list[str]:
    head = ("layers", "dimension", "multiple", "size", "next", "padding", "of all", "A100 best")
    rows = [*map(_row, misses)]
    return aligned([head, *rows], texts=3) if rows else []


def _row(miss: Miss) -> tuple[str, ...]:
    return (
        listed(miss.layers, 1),
        miss.dimension,
        f"{miss.multiple} ({miss.dtype})",
        f"{miss.size:,}",
        f"{miss.next_size:,}",
        f"+{miss.padding_percent:.3g} %",
        "unknown" if miss.share_percent is None else f"{miss.share_percent:.3g} %",
        f"{miss.best_size:,}",
    )
