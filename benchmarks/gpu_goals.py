"""The suite fit and PyTorch's scripts in one run, on a GPU, and which of the goals they meet.

    python benchmarks/fit_goals.py [--budget 500] [--output FOLDER]

Each PyTorch script runs in a process of its own, before and after the suite, so that a drift of the machine shows. It
prints a line a goal with the figure measured, and writes peers-fit.json beside the suite's own results. Goals whose
figures are missing (no GPU, no torch, the budget was spent) are said to be not measured. Exit code 4 if one is missed.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tfopt.bench import results
from tfopt.files import write_atomic

PEERS = Path(__file__).parent / "peers"
SCRIPTS = ("resnet50", "gpt2")


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


def goals(document, peers):
    """The goals of the suite fit.

    Args:
        document: The suite's results.
        peers: The lines of JSON that PyTorch's scripts printed.
    """
    variants = {
        (case["workload"], variant["name"]): variant for case in document["cases"] for variant in case["variants"]
    }
    overlap, resident = variants.get(("resnet50", "overlap")), variants.get(("resnet50", 'overlap, cache="device"'))
    gpt2, mlp = variants.get(("gpt2", "flash attention")), variants.get(("mlp", "overlap"))
    share = _ratio(mlp, "of_ceiling")
    return [
        Goal("resnet50, overlap: share of the step's own speed", 0.98, _ratio(overlap, "of_ceiling")),
        Goal("resnet50, overlap: speed over compiled PyTorch, pinned", 1.0, _over(overlap, peers, "compiled, pinned")),
        Goal('resnet50, cache="device": share of the step\'s own speed', 0.99, _ratio(resident, "of_ceiling")),
        Goal("mlp, overlap: time over the step's own", 1.15, share and 1 / share, at_most=True),
        Goal("gpt2, flash attention: speed over compiled PyTorch", 1.1, _over(gpt2, peers, "compiled, resident")),
        Goal("gpt2: peak memory over compiled PyTorch's", 1.0, _memory(gpt2, peers), at_most=True),
        *(
            Goal(f"{workload}: speed over Keras' under XLA", 2.5, _ratio(variant, "comparison"))
            for (workload, name), variant in variants.items()
            if workload.startswith("attention, ") and name == "flash attention"
        ),
    ]


def _ratio(variant, comparison):
    return variant[comparison]["ratio"] if variant else None


def _over(variant, peers, name):
    """The variant's speed over a peer's: samples of each block, before and after the suite, and the median of both."""
    workload = "resnet50" if name.endswith("pinned") else "gpt2"
    samples = [
        ms for peer in peers if (peer["workload"], peer["variant"]) == (workload, name) for ms in peer["samples_ms"]
    ]
    return statistics.median(samples) / variant["step_time"]["median_ms"] if variant and samples else None


def _memory(variant, peers):
    peaks = [p["peak_memory_mib"] for p in peers if (p["workload"], p["variant"]) == ("gpt2", "compiled, resident")]
    measured = [peak for peak in peaks if peak is not None]
    own = variant and variant["peak_memory_mib"]
    return own / min(measured) if own and measured else None


def run_peers():
    """The lines that PyTorch's scripts print; without torch none, and the reason."""
    lines = []
    for name in SCRIPTS:
        ran = subprocess.run([sys.executable, PEERS / f"{name}.py"], capture_output=True, text=True, check=False)
        if ran.returncode:
            print((ran.stdout or ran.stderr).strip().splitlines()[-1])
            continue
        lines += [json.loads(line) for line in ran.stdout.splitlines()]
    return lines


def main():
    """Runs all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="500", help="seconds for the suite; default 500")
    parser.add_argument("--output", default="tfopt-bench-results", type=Path, help="folder for the results")
    options = parser.parse_args()
    peers = run_peers()
    suite = ["run", "fit", "--budget", options.budget, "--output", str(options.output)]
    subprocess.run([sys.executable, "-m", "tfopt.bench", *suite], check=False)
    peers += run_peers()
    # The names are times: the last is that of this run.
    document = results.read(max(path for path in options.output.glob("20*.json")))
    found = goals(document, peers)
    write_atomic(options.output / "peers-fit.json", json.dumps(peers, indent=1) + "\n")
    print(*found, sep="\n")
    return 4 if any(goal.met is False for goal in found) else 0


if __name__ == "__main__":
    sys.exit(main())
