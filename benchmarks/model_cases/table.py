"""The table: which cells are missing, a process for each model, the file of results, and the page."""

import argparse
import json
import math
import os
import time
import warnings
from collections import Counter
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from model_cases import language, others
from model_cases.tools import FAILS, NOTHING, REFUSED, SAME, TOOLS, WRONG, Found, found
from model_cases.training import Training
from tfopt.bench import isolated
from tfopt.files import write_atomic
from tfopt.measure import environment

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "models-cpu.json"
PAGE = ROOT / "docs" / "models.md"
MARKS = "<!-- models -->\n", "<!-- end of models -->\n"
NETS = {net.name: net for net in (*language.NETS, *others.NETS)}
LIMIT_SECONDS = 900.0
"""For all tools on one model. The tool that runs then counts as hung, and the others go on in a new process."""
_NOTE_LENGTH = 300
_FIGURES = ("alignment", "FLOPs")
"""Tools that change no training: what they found is the cell."""
_EXPLAINED = ("bfloat16", "float16")
"""Tools whose notes are of interest even where training is the same."""


def try_tools(send, name, tools):
    """Sends what each tool does to a model."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    warnings.simplefilter("ignore")
    training = Training(NETS[name])
    for tool in tools:
        started = time.perf_counter()
        cell = found(training, tool)
        send((tool, cell._asdict() | {"seconds": round(time.perf_counter() - started, 1)}))


def tried(name, tools, save):
    """Tries tools on a model, each but those at which the process ends."""
    left = list(tools)

    def note(message):
        left.remove(message[0])
        save(*message)

    while left:
        try:
            isolated.call(try_tools, name, tuple(left), seconds=LIMIT_SECONDS, on_message=note, on_line=lambda _: None)
        except Exception as error:  # noqa: BLE001  the others are tried
            note((left[0], Found(WRONG, f"{type(error).__name__}: {error}")._asdict()))


def versions(document):
    """What a result holds for."""
    return {"tfopt": document["environment"]["tfopt"], **document["environment"]["packages"]}


def begun(path):
    """The results so far, or new ones if there are none of these versions."""
    new = {"schema_version": 1, "environment": environment(), "status": "running", "models": {}}
    with suppress(metadata.PackageNotFoundError):
        new["environment"]["packages"]["keras-hub"] = metadata.version("keras-hub")
    document = json.loads(path.read_text("utf-8")) if path.exists() else new
    return document if versions(document) == versions(new) else new


def table(document):
    """All cells as Markdown, how many there are of a kind, and the notes."""
    notes = {}
    heads = ["Model", *TOOLS]
    rows = [
        [name, *(_cell(tool, cells.get(tool), notes) for tool in TOOLS)] for name, cells in document["models"].items()
    ]
    lines = [f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([counts(document), "", *lines, "", *(f"{number}. {note}" for note, number in notes.items()), ""])


def counts(document):
    """How many cells there are of each kind, as a sentence."""
    kinds = Counter(cell["verdict"] for cells in document["models"].values() for cell in cells.values())
    parts = [f"{kinds[SAME]} times the same training", f"{kinds[REFUSED]} times refused with the reason"]
    parts += [f"{kinds[NOTHING]} times nothing to do", f"{kinds[WRONG]} times wrong"]
    return f"{len(document['models'])} models and {len(TOOLS)} tools: {', '.join(parts)}."


def _cell(tool, cell, notes):
    if cell is None:
        return ""
    said = ", ".join(part for part in (cell["verdict"], cell["said"]) if part)
    if tool in _FIGURES and cell["verdict"] == SAME:
        said = cell["said"]
    if cell["verdict"] == WRONG:
        said, note = WRONG, f"{cell['said']} {cell['why']}"
    else:
        note = cell["why"] if cell["verdict"] in (REFUSED, FAILS) or tool in _EXPLAINED else ""
    if note:
        note = note if len(note) <= _NOTE_LENGTH else f"{note[:_NOTE_LENGTH].rpartition(' ')[0]} …"
        said += f" ({notes.setdefault(note.strip().replace('|', '/'), len(notes) + 1)})"
    return said


def filled(page, document):
    """The page with the table between the marks."""
    begin, end = (page.index(mark) for mark in MARKS)
    return page[: begin + len(MARKS[0])] + "\n" + table(document) + "\n" + page[end:]


def arguments(description):
    """What the command line says."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS, metavar="RESULTS.json", help="where to write")
    parser.add_argument("--only", nargs="+", choices=NETS, metavar="MODEL", help="only these, again")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, metavar="TOOL", help="only these, again")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no model after this")
    parser.add_argument("--page", action="store_true", help="run nothing; fill docs/models.md")
    return parser.parse_args()


def main(description=__doc__):
    """Tries, prints and writes."""
    options, started = arguments(description), time.monotonic()
    if options.page:
        document = json.loads(options.results.read_text("utf-8"))
        write_atomic(PAGE, filled(PAGE.read_text("utf-8"), document))
        return
    document = begun(options.results)
    again = options.only or options.tool
    for name in options.only or NETS:
        cells = document["models"].get(name, {})
        tools = [tool for tool in options.tool or TOOLS if again or tool not in cells]
        if not tools or time.monotonic() - started > options.budget:
            continue
        if NETS[name].needs and not find_spec(NETS[name].needs):
            raise SystemExit(
                f"Expected {NETS[name].needs}, which {name} is part of. Found none. --help says how to install it."
            )

        def save(tool, cell, name=name, cells=cells):
            cells[tool] = cell
            models = document["models"] | {name: cells}
            document["models"] = {each: models[each] for each in NETS if each in models}
            complete = all(len(document["models"].get(each, ())) == len(TOOLS) for each in NETS)
            document["status"] = "complete" if complete else "running"
            write_atomic(options.results, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            print(f"{name}, {tool}: {cell['verdict']} {cell['said'][:200]}", flush=True)

        tried(name, tools, save)
    print(counts(document))
    if options.results == RESULTS:
        write_atomic(PAGE, filled(PAGE.read_text("utf-8"), document))
