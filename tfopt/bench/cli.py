"""The command `tfopt-bench`. Nothing heavy is imported before a command needs it: `--help` answers at once."""

import argparse
import functools
import io
import json
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfopt import __version__
from tfopt.bench.suites import BY_NAME, LISTS, SUMMARIES, expand
from tfopt.errors import CheckpointError, ResultsError, TfoptError, UnsupportedError, unknown_name
from tfopt.text import described, wrapped

DONE, INTERNAL, USAGE, ENVIRONMENT, FAILED, INTERRUPTED = 0, 1, 2, 3, 4, 130
_COMMANDS = ("run", "doctor", "list", "env", "report", "compare", "checkpoint")
_FOLDER = "tfopt-bench-results"
_BUDGET_SECONDS, _LEAST_SECONDS = 285, 10
_ENVIRONMENT_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    parser, received = _parser(), _with_default(sys.argv[1:] if arguments is None else list(arguments))
    if not received[0].startswith("-") and received[0] not in _COMMANDS:
        meant = f"run {received[0]}" if received[0] in _listed() else None
        parser.error(str(unknown_name("command", received[0], _COMMANDS, meant)))
    options = parser.parse_args(received)
    if options.command is not _doctor:  # whose script finds the environment as it is
        # TensorFlow's remarks, from each case's process, would bury the table; a user who sets the variable gets them.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets a table, too
    signal.signal(signal.SIGTERM, _terminated)
    command: Callable[[argparse.Namespace], int] = options.command
    try:
        return command(options)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except UnsupportedError as error:
        return _say(str(error), ENVIRONMENT)
    except ResultsError as error:
        return _say(str(error), USAGE)
    except BrokenPipeError:  # the reader of the output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except (TfoptError, OSError) as error:
        return _say(f"Expected to read and write files. Found: {error}. Check the path and the disk.", ENVIRONMENT)


def _terminated(number: int, frame: object) -> NoReturn:
    """Ends as an interrupt does: keeps what was measured and removes what is temporary."""
    sys.exit(128 + number)


def _say(text: str, code: int) -> int:
    print(wrapped(f"tfopt-bench: {text}", _columns()), file=sys.stderr)
    return code


def _columns() -> int:
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
        self.exit(USAGE, wrapped(f"{self.prog}: error: {message}", _columns()) + "\n")


def _parser() -> argparse.ArgumentParser:
    suites = "suites:\n" + "\n".join(described([*_listed().items()], _columns()))
    codes = (
        "exit codes: 0 done, 1 a case failed or an internal error, 2 wrong usage or an unreadable results file, "
        "3 this environment cannot run it, 4 a result changed or regressed, 130 interrupted, 143 terminated"
    )
    parser = _Parser(
        prog="tfopt-bench",
        description=wrapped(
            "Measures what each optimisation does to real Keras training on this machine.\n"
            f"Without a command: runs every suite but {', '.join(BY_NAME)}.",
            _columns(),
        ),
        epilog=f"{suites}\n\n{wrapped(codes, _columns())}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tfopt {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    json_option = _Parser(add_help=False)
    json_option.add_argument("--json", action="store_true", help="print one JSON document on standard output")

    def add(name: str, help_: str, command: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help_, description=help_, parents=[json_option])
        sub.set_defaults(command=command)
        return sub

    run = add("run", "run suites and write a table, a JSON file and an HTML page", _run)
    run.formatter_class, run.epilog = argparse.RawDescriptionHelpFormatter, suites
    run.add_argument(
        "suites",
        nargs="*",
        metavar="SUITE[/CASE]",
        help=f"a suite, or one of its cases, such as stack/photos (default: all suites but {', '.join(BY_NAME)})",
    )
    run.add_argument("--output", default=_FOLDER, metavar="FOLDER", help=f"where the files go (default: {_FOLDER})")
    run.add_argument(
        "--budget",
        type=_seconds,
        metavar="SECONDS",
        help=f"end the run after this time (default without a GPU: {_BUDGET_SECONDS}, which all cases share)",
    )
    run.add_argument(
        "--resume",
        action="store_true",
        help="resume the last run in the folder that has something left to measure, if there is one",
    )
    add("list", "list the suites", _list)
    add("env", "show what a run on this machine would record about it", _env)
    report = add("report", "show a recorded run as a table and write its HTML page; or all runs of a folder", _report)
    report.add_argument("results", metavar="RESULTS", help="a JSON file that run wrote, or a folder of them")
    report.add_argument(
        "--output",
        metavar="FILE",
        help="the HTML page (default: next to the JSON file); for a folder: the Markdown document; the page and images "
        "are written next to it (default: docs/benchmarks.md if there is a folder docs, otherwise in the folder)",
    )
    compare = add("compare", "compare two recorded runs; exit code 4 if a variant became slower", _compare)
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
    checkpoint = add("checkpoint", "list the checkpoints of a run, or verify every byte of them", _checkpoint)
    checkpoint.add_argument("action", choices=("list", "verify"), metavar="list|verify", help="what to do")
    checkpoint.add_argument("folder", metavar="FOLDER", help="where TrainingCheckpoint saves; nothing is changed there")
    _take_script(add("doctor", "run a training script up to its first fit, and say what slows it down", _doctor))
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


def _run(options: argparse.Namespace) -> int:
    # Before TensorFlow is loaded: a mistyped name, or a missing package, is reported at once.
    from tfopt.bench.workloads import require_all

    try:
        expand(options.suites)
        require_all()
        _require_writable(Path(options.output))
    except ValueError as error:
        return _say(str(error), USAGE)
    from tfopt.bench import report
    from tfopt.bench.results import run_file
    from tfopt.bench.run import run
    from tfopt.files import write_atomic
    from tfopt.hardware import gpus

    shared = options.budget is None and not gpus()
    budget = _BUDGET_SECONDS if shared else options.budget
    file = run(options.suites, options.output, budget_seconds=budget, shared=shared, resume=options.resume)
    page = file.path.with_suffix(".html")
    print(run_file.dumps(file.run) if options.json else report.terminal(file.run))
    write_atomic(page, report.page(file.run))
    if not options.json:
        print(f"\nResults: {file.path}\nPage:    {page}")
    if any(case.error for case in file.run.cases):
        return INTERNAL
    verdicts = [variant.verdict for case in file.run.cases for variant in case.variants]
    return FAILED if "changes the result" in verdicts else DONE


def _require_writable(folder: Path) -> None:
    """Raises ValueError unless files can be written to a folder, which is made if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"{error.strerror}: {str(folder)!r}"
        raise ValueError(f"Expected --output to name a writable folder. Found: {found}. Choose another.") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"Expected --output to name a writable folder. Found: {str(folder)!r} is not. Choose another.")


def _require_file(file: Path, option: str = "--output") -> None:
    """Raises ValueError unless a file can be written in its folder, which must exist."""
    folder = file.parent
    if file.is_dir():
        found = f"{str(file)!r} is a folder"
    elif not folder.is_dir():
        found = f"there is no folder {str(folder)!r}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        found = f"the folder {str(folder)!r} is not writable"
    else:
        return
    raise ValueError(f"Expected {option} to name a file that can be written. Found: {found}. Choose another.")


def _list(options: argparse.Namespace) -> int:
    return _show(_listed(), described([*_listed().items()], _columns()), options)


def _listed() -> dict[str, str]:
    return SUMMARIES | {name: f"for a GPU, in this order: {', '.join(expand([name]))}" for name in LISTS}


def _env(options: argparse.Namespace) -> int:
    from tfopt.bench import isolated
    from tfopt.page import entries

    found = isolated.call(_environment, seconds=_ENVIRONMENT_SECONDS)  # where TensorFlow's remarks are left out
    return _show(found, described(entries(found), _columns()), options)


def _environment(send: Callable[[Any], None]) -> dict[str, Any]:
    from tfopt.measure import environment

    return environment()


def _report(options: argparse.Namespace) -> int:
    from tfopt.bench import report
    from tfopt.bench.results import run_file
    from tfopt.files import write_atomic

    if Path(options.results).is_dir():
        return _report_folder(options)
    run = run_file.read(options.results)
    page = Path(options.output) if options.output else Path(options.results).with_suffix(".html")
    try:
        _require_file(page)
    except ValueError as error:
        return _say(str(error), USAGE)
    write_atomic(page, report.page(run))
    print(run_file.dumps(run) if options.json else report.terminal(run))
    if not options.json:
        print(f"\nPage: {page}")
    return DONE


def _report_folder(options: argparse.Namespace) -> int:
    from tfopt.bench.report import collection
    from tfopt.files import write_atomic

    found = collection.Collection.read(options.results)
    for reason in found.skipped:
        _say(f"warning: {reason}", DONE)
    default = Path("docs") if Path("docs").is_dir() else Path(options.results)
    target = Path(options.output) if options.output else default / "benchmarks.md"
    try:
        _require_file(target)
    except ValueError as error:
        return _say(str(error), USAGE)
    if target.suffix != ".md":
        return _say(f"Expected --output to name a Markdown file (.md) for a folder. Received: {target}.", USAGE)
    if target.exists() and collection.MARK not in target.read_text(encoding="utf-8"):
        return _say(f"Expected {target} to be written by this command. Found another document. Pass --output.", USAGE)
    pictures = {target.with_suffix("") / name: text for name, text in collection.pictures(found).items()}
    written = {
        target: collection.markdown(found, target.stem),
        target.with_suffix(".html"): collection.page(found),
        **pictures,
    }
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
    names = list(map(str, written))
    return _show(names, names, options)


def _compare(options: argparse.Namespace) -> int:
    from tfopt.bench.report import formatting
    from tfopt.bench.results import run_file
    from tfopt.bench.results.changes import changes

    before, after = run_file.read(options.before), run_file.read(options.after)
    if os.path.samefile(options.before, options.after):
        return _say(f"Expected two runs. Found that both are the same file: {options.before!r}. Give another.", USAGE)
    try:
        found = changes(before, after, threshold_percent=options.threshold, force=options.force)
    except ResultsError as error:
        return _say(str(error), FAILED)
    _show([change.to_dict() for change in found], [formatting.changes(found, _columns())], options)
    return FAILED if any(change.failed for change in found) else DONE


def _checkpoint(options: argparse.Namespace) -> int:
    from tfopt import checkpoint

    try:
        if options.action == "verify":
            report = checkpoint.verify(options.folder)
            _show(report.to_dict(), [str(report)], options)
            return DONE if report.passed else FAILED
        found = checkpoint.available(options.folder)
    except (ValueError, CheckpointError) as error:
        return _say(str(error), USAGE)
    lines = [str(each) for each in found] or [f"no checkpoints in {options.folder!r}"]
    return _show([each.to_dict() for each in found], lines, options)


def _doctor(options: argparse.Namespace) -> int:
    from tfopt.bench import doctor
    from tfopt.files import write_atomic

    try:
        doctor.require_script(None if options.module else options.script, page=bool(options.html))
        if options.html:
            _require_file(options.html, "--html")
    except ValueError as error:
        return _say(str(error), USAGE)
    command = [*(["-m"] if options.module else []), options.script, *options.arguments]
    misplaced = [one for one in options.arguments if one in ("--fit", "--steps", "--html", "--json", "--apply")]
    if misplaced:
        note = f"{options.script} gets {', '.join(misplaced)}. Options for doctor go before the script."
        print(wrapped(f"tfopt-bench: {note}", _columns()), file=sys.stderr)
    which = "its first fit" if options.fit == 1 else f"fit number {options.fit}"
    print(wrapped(f"tfopt-bench: running {options.script} up to {which}", _columns()), file=sys.stderr, flush=True)
    output = sys.stderr.fileno() if options.json else None
    try:
        found = doctor.examine(
            command,
            fit=options.fit,
            steps=options.steps,
            page=bool(options.html),
            apply=options.apply,
            output=output,
        )
    except doctor.ScriptError as error:
        return _say(str(error), INTERNAL)
    if found.page:
        write_atomic(options.html, found.page)
    page = [f"\nPage: {options.html}"] if found.page else []
    return _show(found.found, [found.text, *page], options)


def _show(value: Any, lines: Sequence[str], options: argparse.Namespace) -> int:
    print(json.dumps(value, indent=1, ensure_ascii=False) if options.json else "\n".join(lines))
    return DONE
