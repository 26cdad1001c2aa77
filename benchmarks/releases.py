"""What tfopt relies on in each pair of TensorFlow and Keras, and how the tests ended there.

    python benchmarks/releases.py benchmarks/results/releases.json [--tests JUNIT.xml NAME]
    python benchmarks/releases.py benchmarks/results/releases.json --page

Records the installed pair beside those that the file has: the fingerprint of each function that tfopt replaces or
relies on, the private names that it uses, and, with `--tests`, the outcome of a run by `pytest --junitxml`. With
`--page`, nothing is recorded: the table of docs/versions.md is filled in.
"""

import ast
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import harness

import tfopt
from tfopt import repairs
from tfopt.distribute.data_check.fits import DATA_CHECK
from tfopt.fit.overlapping import PATCH
from tfopt.internals.sources import Missing, find, fingerprint, private

EVERY = (*repairs.REPAIRS.values(), PATCH, DATA_CHECK)
PAGE = harness.ROOT / "docs" / "versions.md"


def private_names():
    """What tfopt uses of Keras' and TensorFlow's private parts: the arguments of `private` and `operations`."""
    found = set()
    for file in Path(tfopt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            called = getattr(getattr(node, "func", None), "id", None)
            if called in ("private", "operations"):
                given = [getattr(getattr(one, "value", None), "elts", [one]) for one in node.args]  # *("a", "b") too
                names = [one.value for one in chain.from_iterable(given) if isinstance(one, ast.Constant)]
                if called == "operations":
                    names = [f"keras.src.ops.{name.replace('.', ':')}" for name in names]
                found |= set(names)
    return sorted(found)


def resolves(name):
    """Whether the installed pair has a name."""
    return not isinstance(private(name), Missing)


def printed(target):
    """The fingerprint of a function here; None if it has none."""
    try:
        return fingerprint(getattr(*find(target)))
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError):
        return None


def installed_pair():
    """The names of the installed releases."""
    return f"{version('tensorflow')} + {version('keras')}"


def recorded():
    """The installed pair."""
    return {
        "fingerprints": {
            target: printed(target) for target in sorted(target for one in EVERY for target in one.broken)
        },
        "absent": [one.name for one in EVERY if one.is_absent],
        "names": [name for name in private_names() if resolves(name)],
    }


def outcome(path):
    """How a run of pytest ended: tests passed, skipped and failed."""
    suite = ElementTree.parse(path).getroot().find("testsuite")
    tests, failed, skipped = (int(suite.get(name)) for name in ("tests", "failures", "skipped"))
    failed += int(suite.get("errors"))
    return {"passed": tests - failed - skipped, "skipped": skipped, "failed": failed}


def state(repair, pair):
    """What the fingerprints of a pair make of a repair: "known", "mended upstream", "absent" or "unknown"."""
    if repair.name in pair["absent"]:
        return "absent"
    mended = False
    for target, broken in repair.broken.items():
        found = pair["fingerprints"].get(target)
        if found in repair.mended.get(target, ()):
            mended = True
        elif found not in broken:
            return "unknown"
    return "mended upstream" if mended else "known"


def table(pairs):
    """The table of docs/versions.md."""
    lines = []
    for name in sorted(pairs, key=lambda name: [[int(part) for part in one.split(".")] for one in name.split(" + ")]):
        states = {one.name: state(one, pairs[name]) for one in EVERY}
        known = sum(found in ("known", "mended upstream") for found in states.values())
        absent = ", ".join(f"`{one}`" for one, found in states.items() if found == "absent") or "–"
        tests = "; ".join(f"{kind}: {_said(run)}" for kind, run in pairs[name].get("tests", {}).items()) or "–"
        lines.append([name, f"{known} of {len(states)}", absent, tests])
    return harness.table(("TensorFlow + Keras", "Patches known", "Not there", "Tests"), lines, right=("Patches known",))


def _said(run):
    failed = f", {run['failed']:,} failed" if run["failed"] else ""
    return f"{run['passed']:,} passed, {run['skipped']:,} skipped{failed}"


def main():
    """Records, or fills in the page."""
    parser = harness.parser(__doc__, harness.RESULTS / "releases.json")
    parser.add_argument("--tests", nargs=2, metavar=("JUNIT.xml", "NAME"), help="a run of pytest here, and its name")
    parser.add_argument("--page", action="store_true", help="fill in the table of docs/versions.md")
    options = parser.parse_args()
    pairs = harness.read(options.results, {})
    if options.page:
        harness.fill(PAGE, "releases", table(pairs))
        return
    tests = pairs.get(installed_pair(), {}).get("tests", {})
    if options.tests:
        tests[options.tests[1]] = outcome(options.tests[0])
    pairs[installed_pair()] = recorded() | {"tests": tests}
    harness.write(options.results, dict(sorted(pairs.items())))


if __name__ == "__main__":
    main()
