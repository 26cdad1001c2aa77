"""Starts several workers of one training on this machine: `python -m tfopt.distribute.launch -n 2 train.py`."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from tfopt.distribute.local_cluster import local_cluster
from tfopt.distribute.local_workers import LocalWorkers
from tfopt.errors import ClusterError

USAGE, ENVIRONMENT = 2, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parse(arguments)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
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
        self.exit(USAGE, f"Expected arguments as above. Received: {message}. What to do: see --help for each.\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m tfopt.distribute.launch",
        description="Starts several workers of one training on this machine, each with a TF_CONFIG of its own, and "
        "shows their output with their rank before each line.",
        epilog="exit codes: that of the first worker that failed (128 + n if signal n killed it), 2 wrong usage, "
        "3 too few GPUs, 75 restart me (a worker was lost), 130 interrupted",
    )
    parser.add_argument("-n", dest="workers", type=_count, required=True, metavar="N", help="how many workers")
    parser.add_argument(
        "--gpus-per-worker", type=_count, metavar="K", help="GPUs for each worker (default: strategy() divides them)"
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("script", help="the training script (with -m: module)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    options = parser.parse_args(arguments)
    if not options.module and not Path(options.script).exists():
        parser.error(f"{options.script!r}, and there is no such file")
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
