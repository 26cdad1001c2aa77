"""Starts several workers of one training on this machine: `python -m tfopt.distribute.launch -n 2 train.py`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tfopt.distribute.exit_codes import ENVIRONMENT, USAGE
from tfopt.distribute.local_cluster import local_cluster
from tfopt.distribute.local_workers import LocalWorkers
from tfopt.errors import ClusterError

_USAGE = """\
python -m tfopt.distribute.launch -n N [--gpus-per-worker K] SCRIPT [ARGUMENT ...]
       python -m tfopt.distribute.launch -n N [--gpus-per-worker K] -m MODULE [ARGUMENT ...]"""

_DESCRIPTION = """\
Starts N workers of one training on this machine, each with a TF_CONFIG of its
own, and shows their output with the worker's rank before each line."""

_EXIT_CODES = """\
exit codes:
  0        all workers ended well
  2        wrong usage
  3        this machine cannot run it: too few GPUs, say
  75       each worker that failed had lost another: start the job again
  130      interrupted (Ctrl-C)
  128 + n  signal n ended the first worker that failed: 137 is SIGKILL, as when
           memory runs out, and 143 SIGTERM
  others   the exit code of the first worker that failed

When a worker fails, the others lose it and end with 75; the exit code is still
that of the first. So a scheduler should start the job again after 75, 137 and
143. After any other code the same would happen again."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(arguments)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        sys.stderr.write("[launch] every task of this Slurm step starts workers of its own, of a training of its own\n")
    if os.environ.get("TF_CONFIG"):
        sys.stderr.write("[launch] the TF_CONFIG of the environment is replaced\n")
    try:
        shares = gpu_shares(options.workers, options.gpus_per_worker, os.environ)
        with local_cluster(options.workers) as configs:
            return LocalWorkers(command, list(map(_environ, configs, shares))).run()
    except (ClusterError, OSError) as error:
        sys.stderr.write(f"[launch] {error}\n")
        return ENVIRONMENT


def gpu_shares(workers: int, each: int | None, environ: Mapping[str, str]) -> list[str | None]:
    """Returns the CUDA_VISIBLE_DEVICES of each worker: neighbouring GPUs out of those that this process may use.

    Args:
        workers: How many workers there are.
        each: GPUs a worker. None: nobody's variable is touched.
        environ: Where this process's own CUDA_VISIBLE_DEVICES stands. Its entries are passed on as they are.

    Raises:
        ClusterError: There are too few.

    Example:
        >>> gpu_shares(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
        ['4,5', '6,7']
    """
    if each is None:
        return [None] * workers
    from tfopt.distribute.devices import NAME, visible_entries  # loads NVML's library: only where GPUs are asked for

    entries = visible_entries(environ)
    if len(entries) < workers * each:
        raise ClusterError(
            f"Expected {workers * each} GPUs for {workers} workers of {each} each. Found {len(entries)}"
            f"{' in ' + NAME if NAME in environ else ''}. What to do: start fewer workers, or with a smaller "
            "--gpus-per-worker."
        )
    return [",".join(entries[rank * each : (rank + 1) * each]) for rank in range(workers)]


def _environ(config: str, gpus: str | None) -> dict[str, str]:
    return {**os.environ, "TF_CONFIG": config, "PYTHONUNBUFFERED": "1", **_gpu_variables(gpus)}


def _gpu_variables(gpus: str | None) -> dict[str, str]:
    if gpus is None:
        return {}
    from tfopt.distribute.devices import ASSIGNED, NAME

    return {NAME: gpus, ASSIGNED: "1"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Says what is wrong in three parts."""
        self.print_usage(sys.stderr)
        said = message.replace("the following arguments are required:", "nothing for")
        self.exit(USAGE, f"Expected a command as above. Received: {said}. What to do: correct it; --help says more.\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        usage=_USAGE,
        description=_DESCRIPTION,
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", dest="workers", type=_count, required=True, metavar="N", help="how many workers")
    parser.add_argument(
        "--gpus-per-worker",
        type=_count,
        metavar="K",
        help="GPUs for each worker (default: tfopt.distribute.strategy() divides all among them)",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module, as for python -m")
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    arguments_of_script = parser.add_argument(
        "arguments", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="passed to the script, options too"
    )
    arguments_of_script.required = False  # or argparse would call it missing where the script is
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.script).exists():
        parser.error(f"the script {options.script!r}, and there is no such file")
    return options


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, which is no whole number of 1 or more")
    return value


if __name__ == "__main__":
    sys.exit(main())
