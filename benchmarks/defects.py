"""Every defect of docs/repairs.md, measured in stock Keras and TensorFlow and with tfopt, beside the right value.

    python benchmarks/defects.py [RESULTS.json] [--defect D1] [--budget SECONDS]

Each figure is measured in separate processes, the stock one without any repair. Results are written after each.
"""

import argparse
import datetime
import json
import math
import tempfile
import time
from pathlib import Path

from defect_cases import STOCK, TFOPT, data, fitting, float16, recomputation, replicas, run, xla

from tfopt.bench import isolated
from tfopt.files import write_atomic
from tfopt.measure import environment

CASES = sorted(
    replicas.CASES + recomputation.CASES + float16.CASES + data.CASES + fitting.CASES + xla.CASES,
    key=lambda case: int(case.defect[1:]),
)
LIMIT_SECONDS = 180.0  # after which a case counts as hung


def measured(case, with_tfopt):
    """What a process of its own finds."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return isolated.call(run, case, with_tfopt, Path(folder), seconds=LIMIT_SECONDS)
        except Exception as error:  # noqa: BLE001  the others are measured
            return {"verdict": "failed", "message": f"{type(error).__name__}: {error}"}


def both(case):
    """A case as it is recorded."""
    return {
        "defect": case.defect,
        "figure": case.figure,
        "right": case.right,
        "tolerance": case.tolerance,
        STOCK: measured(case, False),
        TFOPT: measured(case, True) if case.handled else None,
    }


def arguments():
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", metavar="RESULTS.json", help="where to write")
    parser.add_argument("--defect", action="append", metavar="D1", help="only this one; may be repeated")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no case after this")
    return parser.parse_args()


def main():
    """Measures, prints and writes."""
    options, started = arguments(), time.monotonic()
    document = {
        "schema_version": 1,
        "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "environment": environment(),
        "status": "running",
        "cases": [],
    }

    def save():
        if options.results:
            write_atomic(options.results, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    for case in CASES:
        if options.defect and case.defect not in options.defect:
            continue
        if time.monotonic() - started > options.budget:
            document["status"] = "out of budget"
            break
        document["cases"].append(both(case))
        save()
        print(json.dumps(document["cases"][-1], ensure_ascii=False), flush=True)
    else:
        document["status"] = "complete"
    save()


if __name__ == "__main__":
    main()
