"""`python -m tfopt.distribute`: which worker this process would be, and why."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from tfopt.distribute.cluster.resolving import resolve
from tfopt.distribute.placement import visible_devices
from tfopt.errors import ClusterError

_EXIT_ENVIRONMENT = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, or 3 if `strategy()` could not start here either."""
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.distribute",
        description="Prints which worker of which cluster a training started here would be, without starting one.",
        epilog="Exit codes: 0 done, 2 wrong usage, 3 the environment describes the cluster wrongly, or this host has "
        "fewer GPUs than workers.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    wants_json = parser.parse_args(arguments).json
    try:
        cluster = resolve()
        devices = visible_devices(os.environ, cluster)
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_ENVIRONMENT
    # Shown, because they change what NCCL does; tfopt never sets any.
    nccl = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("NCCL_")}
    if wants_json:
        text = json.dumps(cluster.to_dict() | {"devices": devices.to_dict(), "nccl": nccl}, indent=2)
    else:
        text = "\n".join([cluster.explain(), f"  {devices}", *(f"  {name}={value}" for name, value in nccl.items())])
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
