"""Cases in which the variants are one model under unlike settings: dtype policy and XLA."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from tfopt import precision
from tfopt.bench.cases import Case, Scale, Timer, Variant
from tfopt.bench.judging import same_accuracy
from tfopt.bench.workloads import digits
from tfopt.measure import StepTimer


@dataclass(frozen=True, slots=True)
class Setting:
    """A dtype policy (a name or "auto") and whether XLA is on ("auto": as Keras decides)."""

    note: str
    policy: str = "auto"
    jit_compile: bool | str = "auto"


def case(suite: str, question: str, settings: Mapping[str, Setting], scale: Scale) -> Case:
    """A case on `digits`, whose accuracies are compared."""
    return Case(
        suite=suite,
        workload="digits",
        question=question,
        unit="training step",
        variants=[
            Variant(
                name=name,
                note=setting.note,
                timer=partial(_timer, setting, scale),
                values=partial(_accuracies, setting, scale),
            )
            for name, setting in settings.items()
        ],
        judge=same_accuracy(digits.TEST_EXAMPLES),
    )


def _timer(setting: Setting, scale: Scale, stack: ExitStack) -> Timer:
    with precision.policy(setting.policy):
        net = digits.model(width=scale.width, jit_compile=setting.jit_compile)
        return partial(StepTimer(net, digits.batch(scale.batch_size)), scale.steps)


def _accuracies(setting: Setting, scale: Scale) -> Sequence[float]:
    with precision.policy(setting.policy):
        return [digits.accuracy(seed, width=scale.width, jit_compile=setting.jit_compile) for seed in scale.seeds]
