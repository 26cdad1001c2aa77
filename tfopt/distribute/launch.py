"""Starts several workers of one training on this machine: `python -m tfopt.distribute.launch -n 2 train.py`."""

import argparse
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tfopt.distribute.local_workers import LocalWorkers, local_cluster
from tfopt.distribute.watchdog.watch import RESTART
from tfopt.errors import ClusterError

_EXIT_USAGE, _EXIT_ENVIRONMENT = 2, 3
_SIGNALLED = range(129, 193)  # 128 and the number of the signal that ended a worker, 1 to 64

_USAGE = """\
python -m tfopt.distribute.launch -n N [--gpus-per-worker K] [--max-restarts R] SCRIPT [ARGUMENT ...]
       python -m tfopt.distribute.launch -n N [--gpus-per-worker K] [--max-restarts R] -m MODULE [ARGUMENT ...]"""

_DESCRIPTION = """\
Starts N workers of one training on this machine, each with its own TF_CONFIG,
and shows their output with the worker's rank before each line."""

_EXIT_CODES = """\
exit codes:
  0        all workers succeeded
  2        wrong usage
  3        this machine cannot run it, for example because it has too few GPUs
  75       every worker that failed had lost another: restart the job
  130      interrupted (Ctrl-C)
  128 + n  signal n ended the first worker that failed: 137 is SIGKILL, as when
           memory runs out, and 143 SIGTERM
  others   the exit code of the first worker that failed; 1 for an error in the
           script, or if workers took different steps

When a worker fails, the others lose it and exit with 75; the launcher's code is
that of the first. So a scheduler should restart the job after 75, 137 and 143.
After any other code it would fail again. --max-restarts does so here: after 75
and after a worker that a signal ended, unless the launcher itself got one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    options = _parse(arguments)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        sys.stderr.write("[launch] each task of this Slurm step starts its own workers, and so a separate training\n")
    if os.environ.get("TF_CONFIG"):
        sys.stderr.write("[launch] replacing TF_CONFIG of the environment\n")
    try:
        gpus = gpu_variables(options.workers, options.gpus_per_worker, os.environ)
        for restart in range(options.max_restarts + 1):
            if restart:
                sys.stderr.write(f"[launch] restarting all workers, {restart} of at most {options.max_restarts}\n")
            with local_cluster(options.workers) as configs:
                common = os.environ | {"PYTHONUNBUFFERED": "1"}
                environs = [common | {"TF_CONFIG": config} | own for config, own in zip(configs, gpus, strict=True)]
                workers = LocalWorkers(command, environs)
                code = workers.run()
            if workers.was_signalled or not (code == RESTART or code in _SIGNALLED):
                break
        return code
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"[launch] {error}\n")
        return _EXIT_ENVIRONMENT


def gpu_variables(workers: int, each: int | None, environ: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns the variables that give each worker `each` adjacent GPUs among those this process may use.

    Entries of CUDA_VISIBLE_DEVICES are passed on unchanged. If `each` is None, there are no variables; if there are too
    few GPUs, raises ClusterError.

    Example:
        >>> gpu_variables(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})[1]
        {'CUDA_VISIBLE_DEVICES': '6,7', 'TFOPT_GPUS_ASSIGNED': '1'}
    """
    if each is None:
        return [{} for _ in range(workers)]
    from tfopt.distribute.placement import ASSIGNED, VISIBLE, visible_entries  # loads NVML: only if GPUs are asked for

    entries = visible_entries(environ)
    if len(entries) < workers * each:
        raise ClusterError(
            f"Expected {workers * each} GPUs for {workers} workers of {each} each. Found {len(entries)}"
            f"{' in ' + VISIBLE if VISIBLE in environ else ''}. What to do: start fewer workers, or use a smaller "
            "--gpus-per-worker."
        )
    shares = [entries[rank * each : (rank + 1) * each] for rank in range(workers)]
    return [{VISIBLE: ",".join(share), ASSIGNED: "1"} for share in shares]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Reports wrong usage in three parts."""
        self.print_usage(sys.stderr)
        found = message.replace("the following arguments are required:", "nothing for")
        expected = "Expected a command as above."
        self.exit(_EXIT_USAGE, f"{expected} Received: {found}. What to do: correct it; --help says more.\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", dest="workers", type=_count, required=True, metavar="N", help="number of workers")
    parser.add_argument(
        "--gpus-per-worker",
        type=_count,
        metavar="K",
        help="GPUs for each worker (default: tfopt.distribute.strategy() divides all of them)",
    )
    parser.add_argument(
        "--max-restarts",
        type=functools.partial(_count, least=0),
        default=0,
        metavar="R",
        help="start all workers again after one is lost, at most R times (default: 0)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    script_arguments = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="passed to the script, options included"
    )
    script_arguments.required = False  # otherwise argparse reports it missing when SCRIPT is
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.script).exists():
        parser.error(f"the script {options.script!r}, and there is no such file")
    return options


def _count(text: str, *, least: int = 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r}, which is not a whole number of {least} or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
