"""What the benchmarks share: the command line, the file of results, intervals, and tables in pages of docs/."""

import argparse
import json
from pathlib import Path

import numpy as np

from tfopt import measure
from tfopt.files import write_atomic

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_DRAWS = 2000


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
    """Results to be written, with what they were measured on."""
    return {"environment": measure.environment(), **values}


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
