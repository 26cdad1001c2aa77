"""What `tfopt-bench` takes on its command line."""

import argparse
import functools
import math
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tfopt import __version__
from tfopt.bench.suites import LISTS, SUMMARIES, expand
from tfopt.errors import unknown_name
from tfopt.text import described, wrapped

USAGE = 2
"""The exit code of wrong usage."""
BUDGET_SECONDS = 285
"""Of a run without a GPU, by default."""
_LEAST_SECONDS = 10
_FOLDER = "tfopt-bench-results"

Command = Callable[[argparse.Namespace], int]


def parse(arguments: Sequence[str], commands: Mapping[str, Command]) -> argparse.Namespace:
    """Returns the options of a command line, with the command to call as `command`.

    Args:
        arguments: The command line; without a command it is that of `run`.
        commands: What each command calls.

    Raises:
        SystemExit: After `--help`, and with code 2 if the arguments are wrong.
    """
    parser, received = _parser(commands), _with_default(list(arguments))
    if not received[0].startswith("-") and received[0] not in commands:
        meant = f"run {received[0]}" if received[0] in suites_and_lists() else None
        parser.error(str(unknown_name("command", received[0], commands, meant)))
    return parser.parse_args(received)


def suites_and_lists() -> dict[str, str]:
    """Returns what each suite, and each list of suites, measures."""
    return SUMMARIES | {name: f"for a GPU, in this order: {', '.join(expand([name]))}" for name in LISTS}


def columns() -> int:
    """Returns the width of the terminal."""
    return shutil.get_terminal_size().columns


def _with_default(arguments: list[str]) -> list[str]:
    """Adds the default command: `tfopt-bench --json` is `tfopt-bench run --json`."""
    if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help", "--version")):
        return ["run", *arguments]
    return arguments


class _Parser(argparse.ArgumentParser):
    """One whose error messages fit the terminal, as its help does."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USAGE, wrapped(f"{self.prog}: error: {message}", columns()) + "\n")


def _parser(calls: Mapping[str, Command]) -> argparse.ArgumentParser:
    suites = "suites:\n" + "\n".join(described([*suites_and_lists().items()], columns()))
    codes = (
        "exit codes: 0 done, 1 a case failed or an internal error, 2 wrong usage or an unreadable results file, "
        "3 this environment cannot run it, 4 a result changed or regressed, 130 interrupted, 143 terminated"
    )
    parser = _Parser(
        prog="tfopt-bench",
        description=wrapped(
            "Measures what each optimisation does to real Keras training on this machine.\n"
            "Without a command: runs every suite.",
            columns(),
        ),
        epilog=f"{suites}\n\n{wrapped(codes, columns())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tfopt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    json_option = _Parser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print one JSON document on standard output")

    def add(name: str, help_: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_, parents=[json_option])
        sub.set_defaults(command=calls[name])
        return sub

    run = add("run", "run suites and write a table, a JSON file and an HTML page")
    run.formatter_class, run.epilog = argparse.RawDescriptionHelpFormatter, suites
    run.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE[/CASE]",
        help="a suite, or one of its cases, such as stack/photos (default: all suites)",
    )
    run.add_argument("--output", default=_FOLDER, metavar="FOLDER", help=f"where the files go (default: {_FOLDER})")
    run.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help=f"end the run after this time (default without a GPU: {BUDGET_SECONDS}, which all cases share)",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="resume the last run in the folder that has something left to measure, if there is one",
    )
    add("list", "list the suites")
    add("env", "show what a run on this machine would record about it")
    report = add("report", "show a recorded run as a table and write its HTML page; or all runs of a folder")
    report.add_argument("results", metavar="RESULTS", help="a JSON file that run wrote, or a folder of them")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="the HTML page (default: next to the JSON file); for a folder: the Markdown document; the page and images "
        "are written next to it (default: docs/benchmarks.md if there is a folder docs, otherwise in the folder)",
    )
    compare = add("compare", "compare two recorded runs; exit code 4 if a variant became slower")
    compare.add_argument("before", metavar="A", help="the run to compare with: a JSON file that run wrote")
    compare.add_argument("after", metavar="B", help="the run that may have become slower")
    compare.add_argument(
        "--threshold",
        type=_percent,
        default=5.0,
        metavar="PERCENT",
        help="fail if slower by more than this (default: 5)",
    )
    compare.add_argument("--force", action="store_true", help="compare runs on different devices or versions, too")
    checkpoint = add("checkpoint", "list the checkpoints of a run, or verify every byte of them")
    checkpoint.add_argument("action", choices=("list", "verify"), metavar="list|verify", help="what to do")
    checkpoint.add_argument("folder", metavar="FOLDER", help="where TrainingCheckpoint saves; nothing is changed there")
    _take_script(add("doctor", "run a training script up to its first fit, and say what slows it down"))
    return parser


def _take_script(doctor: argparse.ArgumentParser) -> None:
    """Adds the script of `doctor`, and what to do with it."""
    doctor.add_argument("--fit", type=_count, default=1, metavar="N", help="diagnose the Nth fit (default: the first)")
    doctor.add_argument(
        "--steps",
        type=functools.partial(_count, least=5),
        default=50,
        metavar="N",
        help="training steps of each experiment (default: 50)",
    )
    doctor.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page, too")
    doctor.add_argument(
        "--apply",
        action="store_true",
        help="also run the script twice, for --steps steps: as it is, and with what tfopt.tune changes",
    )
    doctor.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    doctor.add_argument("script", metavar="SCRIPT", help="the training script, which runs as it does under python")
    doctor.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments passed to the script")
    doctor.epilog = (
        "exit codes: 0 done, 1 the script or the diagnosis failed, 2 wrong usage, 3 the script did not call fit or its "
        "training cannot be diagnosed, 130 interrupted, 143 terminated"
    )


def _seconds(text: str) -> float:
    what = f"a number of seconds of {_LEAST_SECONDS} or more, since TensorFlow and the first case take that"
    return _number(text, what, lambda value: value >= _LEAST_SECONDS)


def _percent(text: str) -> float:
    return _number(text, "a percentage from 0 to below 100", lambda value: 0 <= value < 100)


def _count(text: str, least: int = 1) -> int:
    what = f"a whole number of {least} or more"
    return int(_number(text, what, lambda value: value >= least and value.is_integer()))


def _number(text: str, expected: str, is_valid: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan  # which is in no range
    if not is_valid(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, received {text!r}")
    return value
