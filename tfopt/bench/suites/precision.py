"""float32 against the mixed policies: a training step each, the accuracy that they train to, and what the gate finds.

On a GPU also ResNet-50 under each of them, with XLA and without.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from tfopt import precision
from tfopt.bench.cases import Case, Scale, Timer, Variant, same_accuracy
from tfopt.bench.workloads import digits, photos
from tfopt.measure import FitTimer, StepTimer
from tfopt.pipelines import build_pipeline

_POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# The slowest of them takes 0.3 s a step, and each step is long beside the wait at a sample's end.
_STEPS, _SAMPLES = 10, 2
_BATCHES = 4  # in the photographs that fit draws from


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings under which a model is trained."""

    note: str
    policy: str = "auto"  # a dtype policy, or "auto"
    jit_compile: bool | str = "auto"  # "auto": as Keras decides


_SETTINGS = {
    "float32": Setting("Keras' default", policy="float32"),
    "mixed_bfloat16": Setting("bfloat16 compute, float32 weights", policy="mixed_bfloat16"),
    "mixed_float16": Setting("float16 compute, float32 weights, loss scaling", policy="mixed_float16"),
}


def cases(scale: Scale) -> list[Case]:
    """Lists the cases for this size."""
    on_digits = digits_case("precision", "What does mixed precision do to a training step?", _SETTINGS, scale)
    resnet = resnet50_cases(scale.resnet, scale.photos) if scale.resnet else []
    return [replace(on_digits, gate=partial(_gate, scale)), *resnet]


def digits_case(suite: str, question: str, settings: Mapping[str, Setting], scale: Scale) -> Case:
    """Returns a case on `digits` that compares accuracies."""
    return Case(
        suite=suite,
        workload="digits",
        question=question,
        unit="training step",
        variants=[
            Variant(
                name=name,
                note=setting.note,
                timer=partial(_digits_timer, setting, scale),
                values=partial(_accuracies, setting, scale),
            )
            for name, setting in settings.items()
        ],
        judge=same_accuracy(digits.TEST_EXAMPLES),
    )


def _digits_timer(setting: Setting, scale: Scale, stack: ExitStack) -> Timer:
    with precision.policy(setting.policy):
        net = digits.conv_net(width=scale.width, jit_compile=setting.jit_compile)
        return partial(StepTimer(net, digits.batch(scale.batch_size)), scale.steps)


def _accuracies(setting: Setting, scale: Scale) -> Sequence[float]:
    with precision.policy(setting.policy):
        return [digits.accuracy(seed, width=scale.width, jit_compile=setting.jit_compile) for seed in scale.seeds]


def _gate(scale: Scale) -> list[dict[str, Any]]:
    net, batch = digits.conv_net(width=scale.width), digits.batch(scale.batch_size)
    return [precision.check(net, batch, policy).to_dict() for policy in _SETTINGS if policy != "float32"]


def resnet50_cases(batch_size: int, photographs: int) -> list[Case]:
    """Returns two cases: the step alone on a resident batch, and the same through fit, fed from the host."""
    resident = cache(partial(photos.batch, batch_size, count=photographs))
    many = cache(partial(photos.batch, _BATCHES * batch_size, count=photographs))
    question = "Which policy trains ResNet-50 fastest, with XLA or without?"
    case = partial(Case, suite="precision", question=question, model=photos.resnet50)
    return [
        case(workload="resnet50", unit="training step", variants=_variants(partial(_step_timer, resident))),
        case(workload="resnet50, fit", unit="step of fit", variants=_variants(partial(_fit_timer, many, batch_size))),
    ]


def _variants(timer: Callable[[str, bool, ExitStack], Timer]) -> list[Variant]:
    recommended = precision.recommend().policy
    return [
        Variant(
            name=f"{policy}, XLA" if jit else policy,
            note=f"dtype policy {policy}, jit_compile={jit}",
            timer=partial(timer, policy, jit),
            recommended=jit and policy == recommended,
            dtype="tensorfloat32" if policy == "float32" else policy.removeprefix("mixed_"),
        )
        for policy in _POLICIES
        for jit in (False, True)
    ]


def _step_timer(data: Callable[[], Any], policy: str, jit: bool, stack: ExitStack) -> Timer:
    with precision.policy(policy):
        timer = StepTimer(photos.resnet50(jit_compile=jit), data())
    return partial(timer, _STEPS, warmup=1, samples=_SAMPLES)


def _fit_timer(data: Callable[[], Any], batch_size: int, policy: str, jit: bool, stack: ExitStack) -> Timer:
    arrays = tuple(part.numpy() for part in data())
    # fit's timer repeats the dataset, and nothing may follow a copy to the device.
    dataset = build_pipeline(arrays, batch_size=batch_size, device=None)
    with precision.policy(policy):
        timer = FitTimer(photos.resnet50(jit_compile=jit), dataset)
    return partial(timer, _STEPS, warmup=1, samples=_SAMPLES)
