"""Prints the goals of a campaign beside what was measured, a line of JSON each.

    python benchmarks/campaign/goals.py FOLDER

Reads the run of tfopt-bench, the lines of the PyTorch scripts and the results of the other scripts in the folder. A
goal whose figure is missing is "not measured". Also writes the PyTorch lines as a document for `tfopt-bench report`.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from campaign.lines import Lines
from campaign.peers import fresh
from tfopt.bench.report.collection import peers_document
from tfopt.files import write_atomic


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach: at least `bound`, or at most. Without a bound it is only reported."""

    what: str
    bound: float | None
    measured: float | None
    at_most: bool = False

    @property
    def verdict(self):
        """ "met", "missed", "not measured", or "reported" where there is no bound."""
        if self.measured is None:
            return "not measured"
        if self.bound is None:
            return "reported"
        reached = self.measured <= self.bound if self.at_most else self.measured >= self.bound
        return "met" if reached else "missed"

    def to_dict(self):
        """JSON values."""
        bound = None if self.bound is None else f"{'≤' if self.at_most else '≥'} {self.bound:g}"
        measured = None if self.measured is None else round(self.measured, 4)
        return {"goal": self.what, "bound": bound, "measured": measured, "verdict": self.verdict}


def goals(document, lines, decisions=None, callback_cost=None):
    """The goals, with their figures.

    Args:
        document: The results of tfopt-bench; None before there are any.
        lines: What PyTorch's scripts printed.
        decisions: The results of decisions.py.
        callback_cost: The results of callback_cost.py.
    """
    cases = {(case["suite"], case["workload"]): case for case in (document or {"cases": []})["cases"]}
    found = {(*key, variant["name"]): variant for key, case in cases.items() for variant in case["variants"]}
    overlap = found.get(("fit", "resnet50", "overlap"))
    cached = found.get(("fit", "resnet50", 'overlap, cache="device"'))
    gpt2, mlp = found.get(("fit", "gpt2", "flash attention")), found.get(("fit", "mlp", "overlap"))
    again = found.get(("fit", "gpt2", "flash attention, activations recomputed"))
    share = _ratio(mlp, "of_ceiling")
    return [
        Goal("resnet50, overlap: share of the step's own speed", 0.98, _ratio(overlap, "of_ceiling")),
        Goal("resnet50, overlap: speed over compiled PyTorch, pinned", 1.0, _over(overlap, lines, "compiled, pinned")),
        Goal('resnet50, cache="device": share of the step\'s own speed', 0.99, _ratio(cached, "of_ceiling")),
        Goal("resnet50 from JPEG: share of the lower ceiling", 0.9, _from_jpeg(cases)),
        Goal("mlp, overlap: time over the step's own", 1.15, share and 1 / share, at_most=True),
        Goal("gpt2, flash attention: speed over compiled PyTorch", 1.1, _over(gpt2, lines, "compiled, resident")),
        Goal("gpt2: peak memory over compiled PyTorch's", 1.0, _memory(gpt2, lines), at_most=True),
        Goal(
            "gpt2, activations recomputed: speed over compiled PyTorch", 1.1, _over(again, lines, "compiled, resident")
        ),
        Goal(
            "gpt2, activations recomputed: peak memory over compiled PyTorch's",
            1.0,
            _memory(again, lines),
            at_most=True,
        ),
        *_attention(cases),
        Goal("all callbacks: percent of a 5 ms step", 0.5, _callbacks(callback_cost), at_most=True),
        Goal("resnet50, naive Keras to what is recommended: speed", 12, _stacked(cases, "resnet50")),
        Goal("gpt2, naive Keras to what is recommended: speed", 6.5, _stacked(cases, "gpt2")),
        Goal("resnet50, over Keras' defaults: speed", None, _stacked(cases, "resnet50", "Keras' defaults")),
        Goal("gpt2, over Keras' defaults: speed", None, _stacked(cases, "gpt2", "Keras' defaults")),
        Goal("xla.decide: seconds beyond its compilations and steps", 1.0, _deciding(decisions), at_most=True),
        Goal("precision.check: seconds in all", 20.0, _gate(decisions), at_most=True),
    ]


def _ratio(variant, comparison):
    return variant[comparison]["ratio"] if variant and variant.get(comparison) else None


def _stacked(cases, workload, baseline=None):
    """The speed of what is recommended over the first script's, or over another variant's."""
    variants = cases.get(("stack", workload), {"variants": []})["variants"]
    ratios = {variant["name"]: _ratio(variant, "comparison") for variant in variants}
    recommended = next((ratios[variant["name"]] for variant in variants if variant["recommended"]), None)
    under = 1.0 if baseline is None else ratios.get(baseline)
    return recommended / under if recommended and under else None


def _from_jpeg(cases):
    variants = cases.get(("pipeline", "resnet50 from JPEG"), {"variants": []})["variants"]
    return next((_ratio(variant, "of_ceiling") for variant in variants if variant["recommended"]), None)


def _attention(cases):
    """Speed and error of attention alone, in each of its shapes; one line where none was measured."""
    found = []
    for (_, workload), case in cases.items():
        variants = {variant["name"]: variant for variant in case["variants"]}
        if not workload.startswith("attention, ") or "flash attention" not in variants:
            continue
        errors = [max(variants[name]["check"]["values"]) for name in variants if variants[name].get("check")]
        more = errors[1] / errors[0] if len(errors) == 2 else None
        speed = _ratio(variants["flash attention"], "comparison")
        found.append(Goal(f"{workload}: speed over Keras' under XLA", 2.5, speed))
        found.append(Goal(f"{workload}: error over Keras'", 1.0, more, at_most=True))
    return found or [Goal("attention alone: speed over Keras' under XLA", 2.5, None)]


def _over(variant, lines, name):
    """The variant's speed over a peer's, whose samples before and after the suites count together."""
    workload = "resnet50" if name.endswith("pinned") else "gpt2"
    own = [line["samples_ms"] for line in lines if (line["workload"], line["variant"]) == (workload, name)]
    samples = [ms for each in own for ms in each]
    median = ((variant or {}).get("step_time") or {}).get("median_ms")
    return statistics.median(samples) / median if median and samples else None


def _memory(variant, lines):
    peaks = [line["peak_memory_mib"] for line in lines if (line["workload"], line["variant"]) == _GPT2_PEER]
    measured = [peak for peak in peaks if peak is not None]
    own = variant and variant["peak_memory_mib"]
    return own / min(measured) if own and measured else None


_GPT2_PEER = ("gpt2", "compiled, resident")


def _callbacks(document):
    measured = document and document["figures"]["on a step"].get("5 ms")
    return measured and measured["wall"]["longer_percent"]


def _deciding(document):
    """The longest median: a decision compiles the step with XLA and without."""
    if not document or not document["decisions"]:
        return None
    names = ("decide_seconds", "timed_seconds", "first_step_seconds")
    rows = [zip(*(samples[name] for name in names), strict=True) for samples in document["decisions"].values()]
    return max(statistics.median(seconds - timed - 2 * first for seconds, timed, first in row) for row in rows)


def _gate(document):
    return statistics.median(document["gate_seconds"]) if document and document["gate_seconds"] else None


def read(folder):
    """What `goals` takes, from a campaign's folder."""
    runs = [path for path in sorted(folder.glob("*.json")) if _json(path).get("schema") == "tfopt-bench"]
    others = [_json(path) if path.exists() else None for path in (folder / "decisions.json", folder / "callbacks.json")]
    return (_json(runs[-1]) if runs else None, fresh(Lines(folder / "peers.jsonl").read()), *others)


def _json(path):
    return json.loads(path.read_text("utf-8"))


if __name__ == "__main__":
    results = Path(sys.argv[1])
    document, lines, *others = read(results)
    if lines:
        write_atomic(results / "peers.json", json.dumps(peers_document(lines), indent=1, ensure_ascii=False) + "\n")
    for goal in goals(document, lines, *others):
        print(json.dumps(goal.to_dict(), ensure_ascii=False), flush=True)
