"""What `tfopt-bench doctor --apply` finds and gains in programs as users write them.

    python benchmarks/programs.py [--pages] [--only NAME ...]

Runs it on each script in benchmarks/programs, from its own folder, and writes what it says to
benchmarks/results/programs-cpu.json as soon as a script is done; a second run goes on with those that are missing. The
table goes into docs/diagnosis.md; with `--pages`, nothing is measured. Needs pillow and keras-hub. Run it on a machine
that has nothing else to do.
"""

import argparse
import json
import os
from pathlib import Path

from tfopt.bench.doctor import examine
from tfopt.diagnosis import Diagnosis
from tfopt.files import write_atomic
from tfopt.measure.times import StepTimes, compare
from tfopt.text import figure

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "programs-cpu.json"
PAGE = ROOT / "docs" / "diagnosis.md"
MARKS = "<!-- programs -->\n", "<!-- end of programs -->\n"
STEPS = 50
SCRIPTS = {path.stem: path for path in sorted((ROOT / "benchmarks" / "programs").glob("*.py"))}


def table(found):
    """What was found and gained, as Markdown."""
    lines = ["| Program | Costs most | Changed | As it is | Tuned | |", "|---|---|---|---:|---:|---|"]
    for name, each in found.items():
        diagnosis = Diagnosis.from_dict(each["diagnosis"])
        causes = [f"{one.name} {round(100 * one.share)} %" for one in diagnosis.worth_changing[:3]] or ["nothing"]
        applied = ", ".join(each["tuning"]["applied"]) or "nothing"
        cells = [f"[{name.replace('_', ' ')}](../benchmarks/programs/{name}.py)", ", ".join(causes), applied]
        lines.append("| " + " | ".join(cells + runs(each["runs"], diagnosis)) + " |")
    return "\n".join([*lines, ""])


def runs(measured, diagnosis):
    """Milliseconds a step as it is and tuned, and how many times as fast that is."""
    if measured is None:
        return [f"{figure(diagnosis.now.median_ms)} ms", "", ""]
    plain, tuned = (StepTimes.from_dict(measured[how]["times"]) for how in ("as it is", "tuned"))
    gain = compare(plain, tuned)
    between = f" [{figure(gain.interval[0])}–{figure(gain.interval[1])}]" if gain.interval else ""
    said = f"{figure(gain.ratio)}×{between}"
    return [f"{figure(plain.median_ms)} ms", f"{figure(tuned.median_ms)} ms", said]


def filled(page, found):
    """The page with the table between the marks."""
    begin, end = (page.index(mark) for mark in MARKS)
    return page[: begin + len(MARKS[0])] + "\n" + table(found) + "\n" + page[end:]


def recorded():
    """What was found so far, in order."""
    found = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return {name: found[name] for name in SCRIPTS if name in found}


def main():
    """Measures what is missing, and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", action="store_true", help="measure nothing; fill the page")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="NAME", help="measure these, again")
    options = parser.parse_args()
    os.chdir(ROOT / "benchmarks" / "programs")
    for name in () if options.pages else options.only or [name for name in SCRIPTS if name not in recorded()]:
        found = recorded()
        examined = examine([SCRIPTS[name].name], steps=STEPS, apply=True)
        found[name] = examined.found
        write_atomic(RESULTS, json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        print(f"== {name}\n{examined.text}", flush=True)
    write_atomic(PAGE, filled(PAGE.read_text("utf-8"), recorded()))


if __name__ == "__main__":
    main()
