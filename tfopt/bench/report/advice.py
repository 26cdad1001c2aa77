"""What to do on the machine of a run: lines to paste, and what they gain over Keras' defaults."""

from collections.abc import Sequence
from dataclasses import dataclass

from tfopt.bench.report.formatting import number, ratio
from tfopt.bench.results import DEFAULTS, NAIVE, CaseResult, Run, VariantResult, paired
from tfopt.measure import Comparison

_ADDED = "+ "
# A line of code for each technique of the suite `stack`, in the order in which a script needs them.
_LINES = {
    "mixed_bfloat16": 'tfopt.precision.set_policy("mixed_bfloat16")',
    "mixed_float16": 'tfopt.precision.set_policy("mixed_float16")',
    "build_pipeline": "dataset = build_pipeline(source, batch_size={batch_size})",
    'cache="memory"': 'dataset = build_pipeline(source, batch_size={batch_size}, cache="memory")',
    'cache="device"': 'dataset = build_pipeline(source, batch_size={batch_size}, cache="device")',
    "XLA": "tfopt.xla.set_jit(model, True)",
    "flash attention": "tfopt.kernels.use_flash_attention(model)",
    "overlap": "tfopt.fit.overlap(model)",
}
_SOURCE = 'source = "path/to/data"  # images or TFRecords; or a tuple of arrays'
_PAGES = {
    "TF32": "precision",
    "mixed": "precision",
    "build": "pipelines",
    "cache": "pipelines",
    "XLA": "xla",
    "flash": "kernels",
}


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
    stack = [v for name, v in measured.items() if name.startswith(_ADDED)]
    defaults = measured.get(DEFAULTS)
    if defaults is None or not stack:
        return None
    best = min(stack, key=lambda variant: _median(variant))
    gain = _gain(defaults, best)
    if gain is None or gain.verdict != "faster":
        text = f"{case.workload}: keep Keras' defaults. Nothing measured here is shown to train faster"
        return Advice(case.workload, f"{text}{'' if gain is None else f' ({_interval(gain)})'}.", "", "")
    kept = stack[: stack.index(best) + 1]
    names = [variant.name.removeprefix(_ADDED) for variant in kept]
    steps = dict(zip(names, _steps(measured.get(case.baseline), kept), strict=True))
    slower = [v.name.removeprefix(_ADDED) for v in stack[len(kept) :]]
    summary = f"The {case.workload} workload trains {_interval(gain)} as fast as with Keras' defaults."
    batch_size = (best.times and best.times.examples_per_step) or 32
    return Advice(case.workload, summary, _code(names, steps, batch_size), _notes(names, steps, slower, case, best))


def _steps(naive: VariantResult | None, kept: Sequence[VariantResult]) -> list[Comparison | None]:
    """What each technique adds to those before it."""
    before = [naive, *kept[:-1]]
    return [None if one is None else _gain(one, other) for one, other in zip(before, kept, strict=True)]


def _code(names: Sequence[str], steps: dict[str, Comparison | None], batch_size: int) -> str:
    cached = any(name.startswith("cache") for name in names)
    lines = []
    for name, line in _LINES.items():
        if name not in names or (name == "build_pipeline" and cached):
            continue
        added, line = steps[name], line.format(batch_size=batch_size)
        lines.append(f"{line}  # {number(added.ratio)}×" if added and added.verdict == "faster" else line)
    imports = ["import tfopt"]
    if "build_pipeline" in names:
        imports.append("from tfopt.pipelines import build_pipeline")
        lines.append("model.fit(dataset)")
        lines.insert(next(i for i, line in enumerate(lines) if "source" in line), _SOURCE)
    return "\n".join([*imports, "", *lines])


def _notes(
    names: Sequence[str],
    steps: dict[str, Comparison | None],
    slower: Sequence[str],
    case: CaseResult,
    best: VariantResult,
) -> str:
    pages = dict.fromkeys(next((page for key, page in _PAGES.items() if name.startswith(key)), "fit") for name in names)
    read = ", ".join(f"docs/{page}.md" for page in pages)
    notes = ["Each comment shows the extra speedup from that line; lines without one made no measurable difference."]
    for name, where in _CACHES.items():
        if (added := steps.get(name)) and added.verdict == "faster":
            notes.append(
                f"A factor of {number(added.ratio)}× comes from the cache {where}, where all examples of this workload "
                "fit."
            )
    if slower:
        notes.append(
            f"Left out, since {'it does' if len(slower) == 1 else 'they do'} not help here: {', '.join(slower)}."
        )
    if (naive := best.metrics and best.metrics.comparison) and case.baseline == NAIVE:
        notes.append(
            f"Compared with all optimisations off, including Keras' defaults, the gain is {number(naive.ratio)}×."
        )
    return " ".join([*notes, f"Read {read}."])


def _median(variant: VariantResult) -> float:
    return variant.times.median_ms if variant.times else float("inf")


def _gain(before: VariantResult, after: VariantResult) -> Comparison | None:
    return paired(before.times, after.times) if before.times and after.times else None


def _interval(gain: Comparison) -> str:
    return ratio(gain.ratio, gain.interval)
