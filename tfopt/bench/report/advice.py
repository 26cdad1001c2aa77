"""What to do on the machine of a run: lines to paste, and what they gain over Keras' defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tfopt.bench.report.formatting import number, ratio
from tfopt.bench.results import DEFAULTS, NAIVE, CaseResult, Run, VariantResult
from tfopt.diagnosis.techniques import FLASH_ATTENTION, OVERLAP, XLA, policy
from tfopt.measure import Comparison, StepTimes, compare

_ADDED = "+ "
_BUILT = "dataset = build_pipeline(data, batch_size={batch_size}{cache})"
_POLICIES = policy("mixed_bfloat16"), policy("mixed_float16")
_OF_MODEL = {one.name: one for one in (*_POLICIES, XLA, FLASH_ATTENTION, OVERLAP)}
# A line of code for each technique of the suite `stack`, in the order in which a script needs them.
_LINES = {
    **{one.name: one.code for one in _POLICIES},
    "build_pipeline": _BUILT.replace("{cache}", ""),
    'cache="memory"': _BUILT.replace("{cache}", ', cache="memory"'),
    'cache="device"': _BUILT.replace("{cache}", ', cache="device"'),
    **{one.name: one.code for one in (XLA, FLASH_ATTENTION, OVERLAP)},
}
_NEEDS = {
    'cache="memory"': {"build_pipeline"},
    'cache="device"': {"build_pipeline"},
    # 16 bits pay with kernels that only XLA has.
    XLA.name: {one.name for one in _POLICIES},
    FLASH_ATTENTION.name: {*(one.name for one in _POLICIES), XLA.name},
}
_DATA = "# data: a folder of images or TFRecords, or a tuple of arrays"
_PAGES = {"TF32": "precision", **{name: one.page for name, one in _OF_MODEL.items()}}
_RESUME = "To measure the rest, run tfopt-bench again with --resume and the same --output."
_CACHES = {'cache="memory"': "in memory", 'cache="device"': "on the GPU"}


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do for one workload of the suite `stack`."""

    workload: str
    summary: str
    """What it gains, in a sentence."""
    code: str
    """Lines to paste; empty if nothing is worth changing."""
    notes: str
    """What was left out and why, and what to read."""


def advise(run: Run) -> list[Advice]:
    """Returns what to do, for each workload whose techniques were stacked and measured beside Keras' defaults."""
    return [found for case in run.cases if case.suite == "stack" and (found := _of_case(case))]


def _of_case(case: CaseResult) -> Advice | None:
    measured = {v.name: v for v in case.measured if v.times and v.verdict != "changes the result"}
    stack = sorted((v for name, v in measured.items() if name.startswith(_ADDED)), key=_median)
    defaults = measured.get(DEFAULTS)
    if defaults is None or not stack:
        return None
    checked = [v for v in stack if v.check is not None and _contents(v, case)]
    if not checked:
        why = "was not checked" if stack[0].check is None else "belongs to techniques that this file does not name"
        return _nothing(case, f"{case.workload}: nothing is recommended, since the result of {stack[0].name} {why}.")
    best = checked[0]
    while before := next((v for v in checked if _contents(v, case) == _contents(best, case)[:-1]), None):
        if _gain(before, best).verdict != "no difference":
            break
        best = before
    gain = _gain(defaults, best)
    if gain.interval is None:
        return _nothing(case, f"{case.workload}: nothing is recommended after so few turns.")
    if gain.verdict != "faster":
        text = f"{case.workload}: keep Keras' defaults. Nothing measured here is shown to train faster"
        return _nothing(case, f"{text} ({_interval(gain)}).")
    return _recommended(case, best, gain, stack)


def _nothing(case: CaseResult, summary: str) -> Advice:
    return Advice(case.workload, summary, "", _RESUME * bool(case.unfinished))


def _recommended(case: CaseResult, best: VariantResult, gain: Comparison, stack: Sequence[VariantResult]) -> Advice:
    contents = _contents(best, case)
    steps = _steps(case, contents)
    kept = [name for name in contents if steps.get(name, "faster") == "faster" or _needed(name, contents)]
    within = [name for name in contents if name not in kept]
    beyond = [v.name.removeprefix(_ADDED) for v in stack if len(_contents(v, case)) > len(contents)]
    credits = {name: _gain(*pair) for name, pair in _pairs(case, contents).items() if steps.get(name) == "faster"}
    summary = f"The {case.workload} workload trains {_interval(gain)} as fast as with Keras' defaults."
    batch_size = _times(best).examples_per_step or 32
    notes = [*_shares(kept, credits), *_left_out(within, beyond), *_beside_naive(case, best)]
    pages = dict.fromkeys(_PAGES.get(name, "pipelines") for name in kept)
    notes += [_RESUME] * bool(case.unfinished) + [f"Read {', '.join(f'docs/{page}.md' for page in pages)}."]
    return Advice(case.workload, summary, _code(kept, credits, batch_size), " ".join(notes))


def _contents(variant: VariantResult, case: CaseResult) -> tuple[str, ...]:
    """The techniques that a variant contains; a run recorded before says so only if it is whole."""
    names = [v.name.removeprefix(_ADDED) for v in case.variants if v.name.startswith(_ADDED)] if case.done else []
    name = variant.name.removeprefix(_ADDED)
    return variant.techniques or tuple(names[: names.index(name) + 1] if name in names else ())


def _pairs(case: CaseResult, contents: tuple[str, ...]) -> dict[str, tuple[VariantResult, VariantResult]]:
    """For each technique the variants without and with it on top of those before it, if both were measured."""
    by = {_contents(v, case): v for v in case.measured if v.name.startswith(_ADDED) or v.name == case.baseline}
    prefixes = [contents[:count] for count in range(len(contents) + 1)]
    found = {after[-1]: (by.get(before), by.get(after)) for before, after in pairwise(prefixes)}
    return {name: (one, other) for name, (one, other) in found.items() if one and other}


def _steps(case: CaseResult, contents: tuple[str, ...]) -> dict[str, str]:
    """What is known of each technique on top of those before it."""
    found = {name: _gain(*pair).verdict for name, pair in _pairs(case, contents).items()}
    return {name: verdict for name, verdict in found.items() if verdict in ("faster", "slower", "no difference")}


def _needed(name: str, contents: Sequence[str]) -> bool:
    """Whether a technique is the ground of another one."""
    return any(name in _NEEDS.get(other, ()) for other in contents)


def _code(kept: Sequence[str], credits: Mapping[str, Comparison], batch_size: int) -> str:
    cached = any(name.startswith("cache") for name in kept)
    lines = []
    for name, line in _LINES.items():
        if name not in kept or (name == "build_pipeline" and cached):
            continue
        added, line = credits.get(name), line.format(batch_size=batch_size)
        lines.append(f"{line}  # {number(added.ratio)}×" if added else line)
    imports = ["import tfopt"]
    if "build_pipeline" in kept:
        imports.append("from tfopt.pipelines import build_pipeline")
        lines = [_DATA, *lines, "model.fit(dataset)"]
    return "\n".join([*imports, "", *lines])


def _shares(kept: Sequence[str], credits: Mapping[str, Comparison]) -> list[str]:
    notes = ["Each comment shows the extra speedup from that line."] if credits else []
    if any(name in _LINES and name not in credits for name in kept):
        notes.append("A line without one was measured together with the others.")
    for name, where in _CACHES.items():
        if added := credits.get(name):
            notes.append(
                f"A factor of {number(added.ratio)}× comes from the cache {where}, where all examples of this workload "
                "fit."
            )
    return notes


def _left_out(within: Sequence[str], beyond: Sequence[str]) -> list[str]:
    notes = []
    if left := [*within, *beyond]:
        notes.append(f"Left out, since {'it does' if len(left) == 1 else 'they do'} not help here: {', '.join(left)}.")
    if within:
        notes.append(f"The factor was measured with {', '.join(within)}.")
    return notes


def _beside_naive(case: CaseResult, best: VariantResult) -> list[str]:
    naive = best.metrics and best.metrics.comparison
    if not naive or case.baseline != NAIVE:
        return []
    return [f"Compared with all optimisations off, including Keras' defaults, the gain is {number(naive.ratio)}×."]


def _median(variant: VariantResult) -> float:
    return _times(variant).median_ms


def _times(variant: VariantResult) -> StepTimes:
    if variant.times is None:
        raise ValueError(f"Expected a variant that was measured. Received: {variant.name!r}.")
    return variant.times


def _gain(before: VariantResult, after: VariantResult) -> Comparison:
    return compare(_times(before), _times(after))


def _interval(gain: Comparison) -> str:
    return ratio(gain.ratio, gain.interval)
