"""All that belongs on a GPU in one command, beside PyTorch, and which of the goals are met.

    python benchmarks/gpu_goals.py [--budget 500] [--output FOLDER]

Runs `tfopt-bench run gpu` within the budget. Each PyTorch script runs in a process of its own, before and after it, so
that a drift of the machine shows. Prints a line a goal with the figure measured, and writes peers.json beside the run's
results. Goals whose figures are missing (no GPU, no torch, the budget was spent) are said to be not measured. Exit code
4 if one is missed. `tfopt-bench report FOLDER` renders the folder.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tfopt.bench.report.collection import peers_document
from tfopt.bench.results import files
from tfopt.files import write_atomic

PEERS = Path(__file__).parent / "peers"
SCRIPTS = ("resnet50", "gpt2", "mlp")


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure to reach: at least `bound`, or at most."""

    what: str
    bound: float
    measured: float | None
    at_most: bool = False

    @property
    def met(self):
        """Whether it is reached; None where it was not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound

    def __str__(self):
        found = "not measured" if self.measured is None else f"{self.measured:.3f}: {'met' if self.met else 'missed'}"
        return f"{self.what}: {'≤' if self.at_most else '≥'} {self.bound:g}, {found}"


def goals(document, lines):
    """The goals, with their figures.

    Args:
        document: The run's results.
        lines: What PyTorch's scripts printed.
    """
    cases = {(case["suite"], case["workload"]): case for case in document["cases"] if not case["error"]}
    found = {(*key, variant["name"]): variant for key, case in cases.items() for variant in case["variants"]}
    overlap, resident = (
        found.get(("fit", "resnet50", "overlap")),
        found.get(("fit", "resnet50", 'overlap, cache="device"')),
    )
    gpt2, mlp = found.get(("fit", "gpt2", "flash attention")), found.get(("fit", "mlp", "overlap"))
    share = _ratio(mlp, "of_ceiling")
    return [
        Goal("resnet50, naive Keras to what is recommended: speed", 12, _stacked(cases, "resnet50")),
        Goal("gpt2, naive Keras to what is recommended: speed", 6.5, _stacked(cases, "gpt2")),
        Goal("resnet50, overlap: share of the step's own speed", 0.98, _ratio(overlap, "of_ceiling")),
        Goal("resnet50, overlap: speed over compiled PyTorch, pinned", 1.0, _over(overlap, lines, "compiled, pinned")),
        Goal('resnet50, cache="device": share of the step\'s own speed', 0.99, _ratio(resident, "of_ceiling")),
        _from_jpeg(cases.get(("pipeline", "resnet50 from JPEG"))),
        Goal("mlp, overlap: time over the step's own", 1.15, share and 1 / share, at_most=True),
        Goal("gpt2, flash attention: speed over compiled PyTorch", 1.1, _over(gpt2, lines, "compiled, resident")),
        Goal("gpt2: peak memory over compiled PyTorch's", 1.0, _memory(gpt2, lines), at_most=True),
        Goal(
            "digits, all callbacks: speed over none",
            0.995,
            _ratio(found.get(("callbacks", "digits", "tfopt's callbacks")), "comparison"),
        ),
        *(
            Goal(f"{workload}: speed over Keras' under XLA", 2.5, _ratio(variant, "comparison"))
            for (_, workload, name), variant in found.items()
            if workload.startswith("attention, ") and name == "flash attention"
        ),
    ]


def _ratio(variant, comparison):
    return variant[comparison]["ratio"] if variant else None


def _stacked(cases, workload):
    """The speed of what is recommended over the first script's."""
    case = cases.get(("stack", workload))
    return case and next(_ratio(variant, "comparison") for variant in case["variants"] if variant["recommended"])


def _from_jpeg(case):
    """The share of the lower of both ceilings, which says what limits it."""
    what, bound = "the step's own speed", 0.9
    if case and case["limit"] == "input alone":
        what, bound = "the speed of decoding alone, which limits", 0.95
    share = case and next(v["of_ceiling"]["ratio"] for v in case["variants"] if v["recommended"])
    return Goal(f"resnet50 from JPEG: share of {what}", bound, share)


def _over(variant, lines, name):
    """The variant's speed over a peer's: samples of each block, before and after the suite, and the median of both."""
    workload = "resnet50" if name.endswith("pinned") else "gpt2"
    samples = [
        ms for line in lines if (line["workload"], line["variant"]) == (workload, name) for ms in line["samples_ms"]
    ]
    return statistics.median(samples) / variant["step_time"]["median_ms"] if variant and samples else None


def _memory(variant, lines):
    peaks = [p["peak_memory_mib"] for p in lines if (p["workload"], p["variant"]) == ("gpt2", "compiled, resident")]
    measured = [peak for peak in peaks if peak is not None]
    own = variant and variant["peak_memory_mib"]
    return own / min(measured) if own and measured else None


def run_peers():
    """The lines that PyTorch's scripts print; without torch none, and the reason."""
    lines = []
    for name in SCRIPTS:
        ran = subprocess.run([sys.executable, PEERS / f"{name}.py"], capture_output=True, text=True, check=False)
        if ran.returncode:
            said = (ran.stdout.strip() or ran.stderr.strip()).splitlines()
            print(f"{name}.py ended with code {ran.returncode}: {said[-1] if said else 'it said nothing'}")
            continue
        lines += [json.loads(line) for line in ran.stdout.splitlines()]
    return lines


def main():
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="500", help="seconds for tfopt-bench; default 500")
    parser.add_argument("--output", default="tfopt-bench-results", type=Path, help="folder for the results")
    options = parser.parse_args()
    before = set(options.output.glob("*.json"))
    lines = run_peers()
    command = ["run", "gpu", "--budget", options.budget, "--output", str(options.output)]
    subprocess.run([sys.executable, "-m", "tfopt.bench", *command], check=False)
    written = set(options.output.glob("*.json")) - before
    if not written:
        return 1  # tfopt-bench has said why
    lines += run_peers()
    found = goals(files.to_json(files.read(written.pop())), lines)
    if lines:
        write_atomic(options.output / "peers.json", json.dumps(peers_document(lines), indent=1) + "\n")
    print(*found, sep="\n")
    return 4 if any(goal.met is False for goal in found) else 0


if __name__ == "__main__":
    sys.exit(main())
