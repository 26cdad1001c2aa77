"""`python -m tfopt.distribute`: which worker this process would be, found where, and why."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tfopt.distribute.devices import visible_devices
from tfopt.distribute.exit_codes import ENVIRONMENT
from tfopt.distribute.nccl import nccl_variables
from tfopt.distribute.resolving import resolve
from tfopt.errors import ClusterError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 3 where `strategy()` could not start either."""
    wants_json = _parser().parse_args(arguments).json
    try:
        cluster = resolve()
        devices = visible_devices(os.environ, cluster)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return ENVIRONMENT
    nccl = nccl_variables(os.environ)
    found = cluster.to_dict() | {"devices": devices.to_dict(), "nccl": nccl}
    lines = [cluster.explain(), f"  {devices}", *(f"  {name}={value}" for name, value in nccl.items())]
    sys.stdout.write((json.dumps(found, indent=2) if wants_json else "\n".join(lines)) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.distribute",
        description="Tells which worker of which cluster a training started here would be, without starting one.",
        epilog="Exit codes: 0 told, 2 wrong usage, 3 the environment describes the cluster wrongly, or "
        "there are fewer GPUs than workers here.",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
