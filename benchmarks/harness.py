"""What the benchmarks share: command line, file of results, intervals, tables in pages of docs/; and running cases."""

import argparse
import datetime
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from tfopt import measure
from tfopt.bench import isolated
from tfopt.files import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_DRAWS = 2000
_LISTING_SECONDS = 300.0


def parser(description, results=None):
    """A command line that takes the file to write, by default `results`; None writes none."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "results",
        nargs="?",
        type=Path,
        default=results,
        metavar="RESULTS.json",
        help="where to write (default: %(default)s)",
    )
    return found


def document(**values):
    """Results to be written, with when and on what they were measured."""
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    return {"started": started, "environment": measure.environment(), **values}


def write(path, document):
    """Writes results; does nothing without a path."""
    if path:
        write_atomic(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def read(path, default=None):
    """The results in a file, or `default` if there is one and no file."""
    if default is not None and not (path and path.exists()):
        return default
    return json.loads(path.read_text("utf-8"))


def one_sample(*turns_ms, first_step_seconds=0.0):
    """Milliseconds, one for each turn, as the times that `compare` wants."""
    return measure.StepTimes(
        repeats_ms=tuple((ms,) for ms in turns_ms), steps_per_sample=1, first_step_seconds=first_step_seconds
    )


def interval(statistic, turns):
    """The 95 % bootstrap interval of a statistic of an array whose last axis is the turns, which are resampled."""
    drawn = np.random.default_rng(0).integers(turns.shape[-1], size=(_DRAWS, turns.shape[-1]))
    return [float(end) for end in np.percentile([statistic(turns[..., draw]) for draw in drawn], (2.5, 97.5))]


def table(heads, rows, right=()):
    """A table in Markdown, whose columns named in `right` are aligned to the right."""
    lines = [heads, ["---:" if head in right else "---" for head in heads], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(page, name, text):
    """A page with a text between the marks of a name."""
    (before, begin, rest), end = page.partition(f"<!-- {name} -->\n"), f"<!-- end of {name} -->\n"
    _, found, after = rest.partition(end)
    if not (begin and found):
        raise ValueError(f"Expected the marks of {name!r}. Found none. Put {begin!r} and {end!r} into the page.")
    return f"{before}{begin}\n{text.strip()}\n\n{end}{after}"


def fill(path, name, text):
    """Puts a text into a page."""
    write_atomic(path, filled(path.read_text("utf-8"), name, text))


def run_cases(description, cases):
    """The main of a script of `tfopt.bench`'s cases: measures each in a process of its own, and prints their table.

    Exits with code 1 if a case failed; the others are measured all the same.
    """
    from tfopt.bench.report import terminal
    from tfopt.bench.results.changes import differences
    from tfopt.bench.results.run_file import RunFile

    command = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("folder", nargs="?", default="tfopt-bench-results", metavar="FOLDER", help="for the results")
    only = "only cases whose name begins with NAME; may be repeated"
    command.add_argument("--case", action="append", default=[], metavar="NAME", help=only)
    command.add_argument("--repeats", type=int, metavar="N", help="turns of each variant")
    command.add_argument("--resume", action="store_true", help="leave out what the last run in the folder has measured")
    options = command.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # or TensorFlow's remarks bury the table
    listed, environment, small = isolated.call(_listed, cases, seconds=_LISTING_SECONDS)
    suites = sorted({one.suite for one, _ in listed})
    file = RunFile.earlier(options.folder, suites) if options.resume else None
    if file is None or file.run.done or differences(file.run.environment, environment):
        file = RunFile.create(options.folder, suites, environment, small=small)
    done = {case.address for case in file.run.cases if case.done}
    for number, (planned, limit_seconds) in enumerate(listed):
        if planned.address in done or (options.case and not planned.workload.startswith(tuple(options.case))):
            continue
        arguments = cases, number, options.repeats
        try:
            found = isolated.call(_measured, *arguments, seconds=limit_seconds, on_message=file.put)
        except Exception as error:  # noqa: BLE001  the others are measured
            so_far = file.run.case(planned.address) or planned
            found = replace(so_far.with_metrics(), unfinished=None, error=f"{type(error).__name__}: {error}")
        file.put(found)
    file.end("complete")
    print(f"{terminal(file.run)}\n\nResults: {file.path}")
    if any(case.error for case in file.run.cases):
        raise SystemExit(1)


def _listed(send, cases):
    """What each case is before it is measured and how long it may take; the environment; and whether sizes are small.

    In a process of its own, since a list may look for GPUs.
    """
    from tfopt.bench.run import default_scale

    scale = default_scale()
    listed = [(case.planned, case.limit_seconds) for case in cases(scale)]
    return listed, measure.environment(), scale.resnet is None


def _measured(send, cases, number, repeats):
    from tfopt.bench.cases.measuring import measure
    from tfopt.bench.run import default_scale

    case = cases(default_scale())[number]
    return measure(replace(case, repeats=repeats or case.repeats), lambda result, variant: send(result))
