"""What `tfopt-bench doctor` says about examples/diagnose.py, as docs/diagnosis.md and README.md show it.

    python benchmarks/doctor.py [RESULTS.json] [--pages]

Runs it, writes the diagnosis (default: to benchmarks/results/diagnosis-cpu.json), and puts that into the two pages.
With `--pages`, nothing is measured: the recorded diagnosis goes into the pages. Run it on a machine that has nothing
else to do.
"""

import os
import re

import harness

from tfopt.bench.doctor import examine
from tfopt.diagnosis import Diagnosis
from tfopt.files import write_atomic

SCRIPT = "examples/diagnose.py"
RESULTS = harness.RESULTS / "diagnosis-cpu.json"
CAUSES = 3  # that README.md has room for
LONG, SHORT = harness.ROOT / "docs" / "diagnosis.md", harness.ROOT / "README.md"
_COMMAND = f"```\n$ tfopt-bench doctor {SCRIPT}\n"


def filled(page, said):
    """The page with this in the block that begins with the command."""
    block, count = re.subn(
        rf"({re.escape(_COMMAND)}).*?(?=^```$)", lambda found: found[1] + said + "\n", page, flags=re.S | re.M
    )
    if count != 1:
        raise ValueError(f"Expected a block that begins with the command. Found {count}.")
    return block


def begun(diagnosis):
    """What the command prints up to the second cause."""
    return str(diagnosis).partition(f"\n\n{diagnosis.worth_changing[1].name}, ")[0] + "\n\n…"


def short(diagnosis):
    """The waterfall, with the most expensive causes."""
    now, *others, computation = str(diagnosis).split("\n\n")[1].splitlines()
    left_out = ["  …"] if len(others) > CAUSES else []
    return "\n".join([now, *others[:CAUSES], *left_out, computation])


def main():
    """Measures and writes."""
    parser = harness.parser(__doc__, RESULTS)
    parser.add_argument("--pages", action="store_true", help="measure nothing; fill the pages")
    options = parser.parse_args()
    if not options.pages:
        os.chdir(harness.ROOT)
        harness.write(options.results, examine([SCRIPT]).found)
    diagnosis = Diagnosis.from_dict(harness.read(options.results))
    for page, said in ((LONG, begun(diagnosis)), (SHORT, short(diagnosis))) if options.results == RESULTS else ():
        write_atomic(page, filled(page.read_text(encoding="utf-8"), said))
    print(diagnosis)


if __name__ == "__main__":
    main()
