"""What `tfopt-bench doctor --apply` finds and gains in programs as users write them.

    python benchmarks/programs.py [RESULTS.json] [--pages] [--only NAME ...]

Runs it on each script in benchmarks/programs, from its own folder, and writes what it says (default: to
benchmarks/results/programs-cpu.json) as soon as a script is done; a second run goes on with those that are missing. The
table goes into docs/diagnosis.md; with `--pages`, nothing is measured. Needs pillow and keras-hub. Run it on a machine
that has nothing else to do.
"""

import os

import harness

from tfopt.bench.doctor import examine
from tfopt.bench.report.formatting import ratio
from tfopt.diagnosis import Diagnosis
from tfopt.measure.times import StepTimes, compare
from tfopt.text import figure

RESULTS = harness.RESULTS / "programs-cpu.json"
PAGE = harness.ROOT / "docs" / "diagnosis.md"
STEPS = 50
RUNS = ("As it is", "Tuned")
SCRIPTS = {path.stem: path for path in sorted(RESULTS.parents[1].glob("programs/*.py"))}


def table(found):
    """What was found and gained, as Markdown."""
    lines = []
    for name, each in found.items():
        diagnosis = Diagnosis.from_dict(each["diagnosis"])
        causes = [f"{one.name} {round(100 * one.share)} %" for one in diagnosis.worth_changing[:3]] or ["nothing"]
        applied = ", ".join(each["tuning"]["applied"]) or "nothing"
        cells = [f"[{name.replace('_', ' ')}](../benchmarks/programs/{name}.py)", ", ".join(causes), applied]
        lines.append(cells + runs(each["runs"], diagnosis))
    return harness.table(("Program", "Costs most", "Changed", *RUNS, ""), lines, right=RUNS)


def runs(measured, diagnosis):
    """Milliseconds a step as it is and tuned, and how many times as fast that is."""
    if measured is None:
        return [f"{figure(diagnosis.now.median_ms)} ms", "", ""]
    plain, tuned = (StepTimes.from_dict(measured[how]["times"]) for how in ("as it is", "tuned"))
    gain = compare(plain, tuned)
    return [f"{figure(plain.median_ms)} ms", f"{figure(tuned.median_ms)} ms", ratio(gain.ratio, gain.interval)]


def recorded(path=RESULTS):
    """What was found so far, in order."""
    found = harness.read(path, {})
    return {name: found[name] for name in SCRIPTS if name in found}


def main():
    """Measures what is missing, and writes."""
    parser = harness.parser(__doc__, RESULTS)
    parser.add_argument("--pages", action="store_true", help="measure nothing; fill the page")
    parser.add_argument("--only", nargs="+", choices=SCRIPTS, metavar="NAME", help="measure these, again")
    options = parser.parse_args()
    results, found = options.results.absolute(), recorded(options.results)
    os.chdir(RESULTS.parents[1] / "programs")
    for name in () if options.pages else options.only or [name for name in SCRIPTS if name not in found]:
        examined = examine([SCRIPTS[name].name], steps=STEPS, apply=True)
        found[name] = examined.found
        harness.write(results, found)
        print(f"== {name}\n{examined.text}", flush=True)
    if results == RESULTS:
        harness.fill(PAGE, "programs", table(recorded()))


if __name__ == "__main__":
    main()
