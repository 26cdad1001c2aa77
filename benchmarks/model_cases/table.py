"""The table: which cells are missing, a process for each model, the file of results, and the page."""

import math
import os
import time
import warnings
from collections import Counter
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec

import harness

from model_cases import language, others
from model_cases.tools import FAILS, NOTHING, REFUSED, SAME, TOOLS, WRONG, Found, found
from model_cases.training import Training
from tfopt.bench import isolated

RESULTS = harness.RESULTS / "models-cpu.json"
PAGE = harness.ROOT / "docs" / "models.md"
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
    new = harness.document(schema_version=1, status="running", models={})
    with suppress(metadata.PackageNotFoundError):
        new["environment"]["packages"]["keras-hub"] = metadata.version("keras-hub")
    document = harness.read(path, new)
    return document if versions(document) == versions(new) else new


def table(document):
    """All cells as Markdown, how many there are of a kind, and the notes."""
    notes = {}
    heads = ["Model", *TOOLS]
    rows = [
        [name, *(_cell(tool, cells.get(tool), notes) for tool in TOOLS)] for name, cells in document["models"].items()
    ]
    numbered = [f"{number}. {note}" for note, number in notes.items()]
    return "\n".join([counts(document), "", harness.table(heads, rows), "", *numbered, ""])


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


def arguments(description):
    """What the command line says."""
    parser = harness.parser(description, RESULTS)
    parser.add_argument("--only", nargs="+", choices=NETS, metavar="MODEL", help="only these, again")
    parser.add_argument("--tool", nargs="+", choices=TOOLS, metavar="TOOL", help="only these, again")
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS", help="begin no model after this")
    parser.add_argument("--page", action="store_true", help="run nothing; fill docs/models.md")
    return parser.parse_args()


def main(description=__doc__):
    """Tries, prints and writes."""
    options, started = arguments(description), time.monotonic()
    if options.page:
        harness.fill(PAGE, "models", table(harness.read(options.results)))
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
            harness.write(options.results, document)
            print(f"{name}, {tool}: {cell['verdict']} {cell['said'][:200]}", flush=True)

        tried(name, tools, save)
    print(counts(document))
    if options.results == RESULTS:
        harness.fill(PAGE, "models", table(document))
