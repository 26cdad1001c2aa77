"""GPT-2's step as Keras computes it, recomputed, and with its loss in pieces: memory, time, and the same losses."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import keras

from tfopt import kernels
from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.bench.cases.training import Training, same_losses, training
from tfopt.measure import StepTimer
from tfopt.memory import estimate, recompute

_LOSSES = 5
_STEPS, _SAMPLES = 6, 2
_PIECES = 8  # "auto" would not divide a small model's logits

_Put = Callable[[keras.Model], Any] | None


def cases(scale: Scale) -> list[Case]:
    """Lists the case for this size."""
    trained = training(scale)
    ways: dict[str, tuple[str, _Put]] = {
        "as Keras computes it": ("all activations and logits are kept", None),
        "recomputed": ("tfopt.memory.recompute", recompute),
        "activations recomputed": ('recompute(model, "activations")', partial(recompute, layers="activations")),
        "loss in pieces": (
            "tfopt.kernels.chunk_cross_entropy",
            partial(kernels.chunk_cross_entropy, chunks=_PIECES),
        ),
    }
    return [
        Case(
            suite="memory",
            workload=trained.workload,
            question="How much memory does each technique save, and how much slower is a step?",
            unit="training step",
            variants=[
                Variant(name=name, note=note, timer=partial(_timer, trained, put), values=partial(_found, trained, put))
                for name, (note, put) in ways.items()
            ],
            judge=same_losses(f"of {_LOSSES} steps on one batch"),
        )
    ]


def _timer(trained: Training, put: _Put, stack: ExitStack) -> Timer:
    return partial(StepTimer(trained.net(put), trained.batch()), _STEPS, warmup=1, samples=_SAMPLES)


def _found(trained: Training, put: _Put) -> Sequence[float]:
    """MiB that a step takes, and the losses of the first steps on one batch."""
    net, batch = trained.net(put), trained.batch()
    return [estimate(net, batch).total_mib, *(float(net.train_on_batch(*batch)) for _ in range(_LOSSES))]
