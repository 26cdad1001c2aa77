"""tfopt's input pipelines beside hand-written tf.data, Grain and PyTorch: speed, caches, planning and the first batch.

    pip install '.[bench]' -r benchmarks/peers/requirements.txt
    python benchmarks/pipelines.py [RESULTS.json] [--case NAME] [--budget SECONDS]

Each case runs in a process of its own. There every way to feed the same training is gone through once, which checks
its elements (shapes, dtypes, every example once, the right rows), and then all are measured in turn, A B C A B C …, by
the wall and by CPU time. A sample is the time of a batch in whole epochs, or of the first batch, from iter() on. The
table shows tfopt's speed in times of that by hand (or its time, where the goal is one), the median of the turns'
ratios with a 95 % interval. Goals are met by the median by the wall; CPU time stands beside it, which other programs
on the machine disturb less. Results are written after each round of turns.
"""

import math
import statistics
import tempfile
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import harness
from pipeline_cases import (
    CLOCKS,
    TINY,
    Scale,
    figures,
    first_batches,
    measure,
    of_arrays,
    of_images,
    of_loaders,
    of_mixtures,
    of_records,
    of_remote,
    of_tables,
    on_disk,
)

from tfopt.bench import isolated

CASES = of_arrays.CASES | of_records.CASES | of_tables.CASES | of_mixtures.CASES
CASES |= of_loaders.CASES | of_remote.CASES
CASES |= on_disk.CASES | of_images.CASES | first_batches.CASES
LIMIT_SECONDS = 180.0  # of a case, after which it counts as hung


def run(send, name, scale, turns):
    """Measures one case; `send` takes its JSON after each round."""
    with tempfile.TemporaryDirectory() as folder:
        return measure(replace(CASES[name](Path(folder), scale), name=name), turns or scale.turns, send)


def chosen(names):
    """Names of the cases that begin with one of these, or all."""
    unknown = [name for name in names if not any(case.startswith(name) for case in CASES)]
    if unknown:
        raise SystemExit(f"Expected the beginning of a case's name. Received: {unknown}. Cases: {', '.join(CASES)}")
    return [case for case in CASES if not names or case.startswith(tuple(names))]


def arguments():
    """What the command line says."""
    parser = harness.parser(__doc__)
    parser.add_argument("--case", action="append", default=[], metavar="NAME", help="begins so; may be repeated")
    parser.add_argument("--turns", type=int, metavar="N", help="of each way; default 11")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no case after this")
    parser.add_argument("--tiny", action="store_true", help="little data and two turns, to see whether it runs")
    parser.add_argument("--list", action="store_true", help="list the cases")
    parser.add_argument("--table", action="store_true", help="print the table of RESULTS.json as Markdown")
    return parser.parse_args()


def versions():
    """Of packages that only this benchmark needs."""
    return {
        name: metadata.version(name)
        for name in ("grain", "array-record", "pillow", "torch", "pyarrow")
        if _installed(name)
    }


def _installed(name):
    return any(metadata.distributions(name=name))


def show(case):
    """Prints a case's figures."""
    _, goal, _, _, wall, cpu, grain, verdict = figures.cells(case)
    print(f"{case['name']}: {verdict} (goal {goal}); wall {wall}, CPU {cpu}, of Grain's speed {grain}")
    for way in case.get("ways", ()):
        if way["skipped"]:
            print(f"    {way['name']}: skipped: {way['skipped']}")
        elif way["wall_ms"]:
            wall, cpu = (statistics.median(ms for ms in way[clock] if ms is not None) for clock in CLOCKS)
            print(f"    {way['name']}: {wall:.3f} ms a {case['unit'].split(',')[0]}, CPU {cpu:.3f} ms ({way['note']})")
    print(end="", flush=True)


def main():
    """Measures, prints and writes."""
    options = arguments()
    if options.table:
        print(figures.markdown(harness.read(options.results)), end="")
        return
    names, started = chosen(options.case), time.monotonic()
    if options.list:
        print("\n".join(names))
        return
    document = harness.document(
        judged_by=figures.JUDGED_BY,
        status="running",
        cases=[],
    )
    document["environment"]["beside"] = versions()

    def put(case):
        document["cases"] = [one for one in document["cases"] if one["name"] != case["name"]] + [case]
        harness.write(options.results, document)

    scale = TINY if options.tiny else Scale()
    for name in names:
        if time.monotonic() - started > options.budget:
            document["status"] = "out of budget"
            break
        try:
            case = isolated.call(run, name, scale, options.turns, seconds=LIMIT_SECONDS, on_message=put)
        except Exception as error:  # noqa: BLE001  the others are measured
            before = next((one for one in document["cases"] if one["name"] == name), {"name": name, "question": name})
            case = before | {"error": f"{type(error).__name__}: {error}"}
        put(case)
        show(case)
    else:
        document["status"] = "complete"
    harness.write(options.results, document)
    print()
    print(figures.markdown(document), end="")


if __name__ == "__main__":
    main()
