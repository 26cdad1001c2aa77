"""The command `tfopt-bench`. Nothing heavy is imported before a command needs it: `--help` answers at once."""

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tfopt.bench.arguments import BUDGET_SECONDS, USAGE, Command, columns, parse, suites_and_lists
from tfopt.bench.suites import expand
from tfopt.errors import CheckpointError, ResultsError, TfoptError, UnsupportedError
from tfopt.text import described, wrapped

DONE, INTERNAL, ENVIRONMENT, FAILED, INTERRUPTED = 0, 1, 3, 4, 130
_ENVIRONMENT_SECONDS = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments, _COMMANDS)
    if options.command is not _doctor:  # whose script finds the environment as it is
        # TensorFlow's remarks, from each case's process, would bury the table; a user who sets the variable gets them.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an ASCII terminal gets a table, too
    signal.signal(signal.SIGTERM, _terminated)
    command: Command = options.command
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
    print(wrapped(f"tfopt-bench: {text}", columns()), file=sys.stderr)
    return code


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
    from tfopt.bench.run import resume_command, run
    from tfopt.files import write_atomic
    from tfopt.hardware import gpus

    budget = BUDGET_SECONDS if options.budget is None and not gpus() else options.budget
    file = run(options.suites, options.output, budget_seconds=budget, resume=options.resume)
    page = file.path.with_suffix(".html")
    print(run_file.dumps(file.run) if options.json else report.terminal(file.run))
    write_atomic(page, report.page(file.run))
    if not options.json:
        print(f"\nResults: {file.path}\nPage:    {page}")
        if any(case.unfinished for case in file.run.cases):
            print(f"To measure the rest: {resume_command(options.output)}")
    if any(case.error for case in file.run.cases):
        return INTERNAL
    verdicts = [variant.verdict for case in file.run.cases for variant in case.variants]
    if not any(verdicts):
        return _say("nothing was measured: the budget ran out, or this machine can run none of it", ENVIRONMENT)
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
    return _show(suites_and_lists(), described([*suites_and_lists().items()], columns()), options)


def _env(options: argparse.Namespace) -> int:
    from tfopt.bench import isolated
    from tfopt.page import entries

    found = isolated.call(_environment, seconds=_ENVIRONMENT_SECONDS)  # where TensorFlow's remarks are left out
    return _show(found, described(entries(found), columns()), options)


def _environment(send: Callable[[Any], None]) -> dict[str, Any]:
    from tfopt import repairs
    from tfopt.distribute.data_check.fits import DATA_CHECK
    from tfopt.fit.overlapping import PATCH
    from tfopt.internals.probing import folder
    from tfopt.measure import environment

    patches: dict[str, list[str]] = {}  # by what is known of the functions that they replace in this Keras
    for patch in (*repairs.REPAIRS.values(), PATCH, DATA_CHECK):
        patches.setdefault(patch.standing(), []).append(patch.name)
    return environment() | {"patches": patches, "patch_answers": folder()}


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
    _show([change.to_dict() for change in found], [formatting.changes(found, columns())], options)
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
        print(wrapped(f"tfopt-bench: {note}", columns()), file=sys.stderr)
    which = "its first fit" if options.fit == 1 else f"fit number {options.fit}"
    print(wrapped(f"tfopt-bench: running {options.script} up to {which}", columns()), file=sys.stderr, flush=True)
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


_COMMANDS: dict[str, Command] = {
    "run": _run,
    "doctor": _doctor,
    "list": _list,
    "env": _env,
    "report": _report,
    "compare": _compare,
    "checkpoint": _checkpoint,
}
