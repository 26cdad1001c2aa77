"""Every defect of docs/repairs.md, measured in stock Keras and TensorFlow and with tfopt, beside the right value.

    python benchmarks/defects.py [RESULTS.json] [--defect D1] [--budget SECONDS]

Each figure is measured in separate processes, the stock one without any repair. Results are written after each.
"""

import json
import math
import tempfile
import time
from pathlib import Path

import harness
from defect_cases import STOCK, TFOPT, data, fitting, float16, recomputation, replicas, run, xla

from tfopt.bench import isolated

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
    parser = harness.parser(__doc__)
    parser.add_argument("--defect", action="append", metavar="D1", help="only this one; may be repeated")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no case after this")
    return parser.parse_args()


def main():
    """Measures, prints and writes."""
    options, started = arguments(), time.monotonic()
    document = harness.document(
        schema_version=1,
        status="running",
        cases=[],
    )
    for case in CASES:
        if options.defect and case.defect not in options.defect:
            continue
        if time.monotonic() - started > options.budget:
            document["status"] = "out of budget"
            break
        document["cases"].append(both(case))
        harness.write(options.results, document)
        print(json.dumps(document["cases"][-1], ensure_ascii=False), flush=True)
    else:
        document["status"] = "complete"
    harness.write(options.results, document)


if __name__ == "__main__":
    main()
