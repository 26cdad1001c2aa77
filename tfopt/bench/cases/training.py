"""GPT-2 as the suites `memory` and `batch` train it: whole on a GPU, small on a CPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tfopt import kernels, precision
from tfopt.bench.cases import Judge, Scale
from tfopt.bench.cases.kernels import GPT2_BATCH
from tfopt.bench.results import Check
from tfopt.bench.workloads import gpt2

_TOLERANCE = 1e-3  # relative: in 16 bits, what is computed in another order differs by rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A model, its policy and its batches."""

    workload: str
    """The name of cases that train it."""
    policy: str
    examples: int
    """In a batch."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Of the model, where they are not GPT-2's own."""

    def net(self, put: Callable[[keras.Model], Any] | None = None) -> keras.Model:
        """Returns the model, always from the same weights, changed by `put`."""
        keras.utils.set_random_seed(0)
        with precision.policy(self.policy):
            net = gpt2.model(**self.sizes, jit_compile=True)
        if self.policy != "float32":
            kernels.use_flash_attention(net)
        if put is not None:
            put(net)
        return net

    def batch(self) -> tuple[Any, Any]:
        """Returns tokens and those that follow them, shape (examples, length) each."""
        sizes = {name: size for name, size in self.sizes.items() if name in ("length", "vocabulary")}
        return gpt2.batch(self.examples, **sizes)


_SMALL = Training(
    workload="gpt2, small",
    policy="float32",
    examples=4,
    sizes={"blocks": 3, "width": 96, "heads": 4, "vocabulary": 4096, "length": 192},
)
_WHOLE = Training(workload="gpt2", policy="mixed_bfloat16", examples=GPT2_BATCH)


def training(scale: Scale) -> Training:
    """The training of this size."""
    return _SMALL if scale.resnet is None else _WHOLE  # which only a GPU gets through in time


def same_losses(which: str) -> Judge:
    """Judges losses, which must be the baseline's; the first of the values is what a step takes, in MiB."""

    def judge(baseline: Sequence[float], values: Sequence[float]) -> Check:
        mib, *losses = values
        within = f"within {100 * _TOLERANCE:g} % of the baseline's"
        return Check(
            what=f"MiB of a step by XLA's buffer assignment; losses {which}: {within}",
            values=tuple(values),
            passed=bool(np.allclose(losses, baseline[1:], rtol=_TOLERANCE, atol=0)),
            text=f"{mib:,.0f} MiB",
        )

    return judge
