"""Cases in which the variants are one model under unlike settings: dtype policy and XLA."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras

from tfopt import precision
from tfopt.bench.cases import Case, Scale, Timer, Variant, same_accuracy
from tfopt.bench.workloads import digits, resnet50
from tfopt.measure import StepTimer

_RESNET_STEPS = 50


@dataclass(frozen=True, slots=True)
class Setting:
    """A dtype policy (a name or "auto") and whether XLA is on ("auto": as Keras decides)."""

    note: str
    policy: str = "auto"
    jit_compile: bool | str = "auto"


def cases(suite: str, question: str, settings: Mapping[str, Setting], scale: Scale) -> list[Case]:
    """A case on `digits`, whose accuracies are compared, and on a GPU one on `resnet50`."""
    case = partial(Case, suite=suite, question=question, unit="training step")
    net = partial(digits.model, width=scale.width)
    found = [
        case(
            workload="digits",
            variants=[
                Variant(
                    name=name,
                    note=setting.note,
                    timer=partial(_timer, setting, net, partial(digits.batch, scale.batch_size), scale.steps),
                    values=partial(_accuracies, setting, scale),
                )
                for name, setting in settings.items()
            ],
            judge=same_accuracy(digits.TEST_EXAMPLES),
        )
    ]
    if scale.resnet:
        photographs = partial(resnet50.batch, scale.resnet, count=scale.photos)
        found.append(
            case(
                workload="resnet50",
                variants=[
                    Variant(
                        name=name,
                        note=setting.note,
                        timer=partial(_timer, setting, resnet50.model, photographs, _RESNET_STEPS),
                    )
                    for name, setting in settings.items()
                ],
            )
        )
    return found


def _timer(
    setting: Setting, model: Callable[..., keras.Model], data: Callable[[], Any], steps: int, stack: ExitStack
) -> Timer:
    with precision.policy(setting.policy):
        return partial(StepTimer(model(jit_compile=setting.jit_compile), data()), steps)


def _accuracies(setting: Setting, scale: Scale) -> Sequence[float]:
    with precision.policy(setting.policy):
        return [digits.accuracy(seed, width=scale.width, jit_compile=setting.jit_compile) for seed in scale.seeds]
