"""`python -m tfopt.distribute`: which worker this process would be, and why."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.placement import visible_devices
from tfopt.errors import ClusterError

_EXIT_ENVIRONMENT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 3 if `strategy()` could not start here either."""
    wants_json = _parser().parse_args(arguments).json
    try:
        cluster = resolve()
        devices = visible_devices(os.environ, cluster)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_ENVIRONMENT
    nccl = nccl_variables(os.environ)
    found = cluster.to_dict() | {"devices": devices.to_dict(), "nccl": nccl}
    lines = [cluster.explain(), f"  {devices}", *(f"  {name}={value}" for name, value in nccl.items())]
    sys.stdout.write((json.dumps(found, indent=2) if wants_json else "\n".join(lines)) + "\n")
    return 0


def nccl_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment's NCCL variables, sorted by name. tfopt records them and never sets any."""
    return {name: environ[name] for name in sorted(environ) if name.startswith("NCCL_")}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.distribute",
        description="Prints which worker of which cluster a training started here would be, without starting one.",
        epilog="Exit codes: 0 done, 2 wrong usage, 3 the environment describes the cluster wrongly, or this host has "
        "fewer GPUs than workers.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
