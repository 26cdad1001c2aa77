"""Records what `precision.check` says of every case of the precision matrix, and whether that is right.

    PYTHONPATH=tests/support python benchmarks/precision_verdicts.py [RESULTS.json] [--only CASE ...]

A case is a model and a policy with the verdict that is right, known without `check`
(`tests/support/precision_matrix`). Each goes into RESULTS as soon as it is done; a second run goes on with those that
are missing there. The cases of KerasHub need it: `.ci/run` says how to install it.
"""

import time
from collections import Counter
from contextlib import suppress
from importlib import metadata

import harness
import keras
from precision_matrix.case import run
from precision_matrix.cases import ALL

from tfopt import repairs


def judged(case):
    """The record of a case, in a process that is as it began."""
    for repair in repairs.REPAIRS.values():
        if repair.installed:  # by the case before
            repair.remove()
    keras.backend.clear_session()
    started = time.perf_counter()
    found = run(case)
    return {
        "case": case.id,
        "expected": found.expected,
        "verdict": found.verdict,
        "outcome": found.outcome,
        "said": " ".join(found.said.splitlines()[: 2 if found.verdict == "fail" else 1]),
        "seconds": round(time.perf_counter() - started, 1),
    }


def sentences(document):
    """What docs/precision.md says of the run."""
    found = document["cases"]
    right = Counter(one["verdict"] for one in found if one["outcome"] == "right")
    wrong = Counter(one["outcome"] for one in found)
    train = "trains" if wrong["wrong refusal"] == 1 else "train"
    return (
        f"`check` was run on {len(found)} models under a policy whose verdict is known without it: {right['pass']} "
        f"pass and {right['fail']} fail rightly, and {right['refuse']} that cannot be judged are refused with the "
        f"reason. It passes none wrongly, crashes on none, and fails {wrong['wrong refusal']} that {train} well"
    )


def main():
    """Judges, prints and writes."""
    parser = harness.parser(__doc__)
    parser.add_argument("--only", action="append", metavar="CASE", help="judge only these, again if they are there")
    options = parser.parse_args()
    document = harness.document(status="running", cases=[])
    with suppress(metadata.PackageNotFoundError):
        document["environment"]["packages"]["keras-hub"] = metadata.version("keras-hub")
    document = harness.read(options.results, document)
    done = {one["case"]: one for one in document["cases"]}
    for case in ALL:
        if case.id not in options.only if options.only else case.id in done:
            continue
        done[case.id] = judged(case)
        print(f"{case.id}: {done[case.id]['outcome']}, {done[case.id]['seconds']} s", flush=True)
        document["cases"] = [done[case.id] for case in ALL if case.id in done]
        document["status"] = "complete" if len(document["cases"]) == len(ALL) else "running"
        harness.write(options.results, document)
    print(sentences(document))


if __name__ == "__main__":
    main()
