"""`python -m tfopt.pipelines.serve`: the servers of a tf.data service, on one machine or on several."""

import argparse
import ipaddress
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from tfopt.errors import PipelineError
from tfopt.pipelines.service.guard import Guard
from tfopt.pipelines.service.servers import Servers

_EXIT_ENVIRONMENT, _EXIT_INTERRUPTED = 3, 130
_LOOK_SECONDS = 0.5  # between looks for signals, and for addresses that the machine has got since
_HIGHEST_PORT = 65535
# Held until the process ends: TensorFlow's `stop`, which their deletion calls, may wait without end for a server that
# has just begun, and saves nothing: the dispatcher writes its state as it goes.
_RUNNING: list[Servers] = []


class _Terminated(BaseException):
    """SIGTERM came."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the servers until a signal; returns the exit code: 0 on SIGTERM, 130 on Ctrl-C, 3 where they cannot run."""
    chosen = vars(_parser().parse_args(arguments))
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
    try:
        with Guard(chosen["bind"]) as guard:
            _RUNNING.append(Servers(guard, **chosen))
            sys.stdout.write(f"{_RUNNING[-1]}\n")
            sys.stdout.flush()
            while True:
                time.sleep(_LOOK_SECONDS)
                guard.refresh()
    except _Terminated:
        return 0
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except PipelineError as error:
        sys.stderr.write(f"{error}\n")
        return _EXIT_ENVIRONMENT


def _terminate(number: int, frame: Any) -> NoReturn:
    del number, frame
    raise _Terminated


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tfopt.pipelines.serve",
        description="Runs a dispatcher and workers of a tf.data service, which prepare the input of trainings: "
        "plan_pipeline(source, service='grpc://HOST:PORT'). Without arguments, both on this machine alone. Prints the "
        "addresses when it is ready, and runs until SIGTERM or Ctrl-C.",
        epilog="On several machines: `serve --bind 0.0.0.0 --workers 0` on one, `serve --bind 0.0.0.0 --dispatcher "
        "HOST:5050` on the others. Whoever reaches the ports may run TensorFlow graphs there, and read files: keep "
        "them behind a firewall. Exit codes: 0 stopped by SIGTERM, 2 wrong usage, 3 it cannot run (a port is taken), "
        "130 Ctrl-C.",
    )
    add = parser.add_argument
    add("--dispatcher", default="", metavar="HOST:PORT", help="one that runs elsewhere; default: start one here")
    add("--port", type=_port, default=5050, help="the dispatcher's port, 0 for any (default: %(default)s)")
    add("--workers", type=_count, default=1, help="workers to start; one uses all cores (default: %(default)s)")
    add("--worker-port", type=_port, default=0, help="the first worker's port, others follow it (default: any)")
    add("--bind", type=_address, default="127.0.0.1", help="0.0.0.0 for all addresses (default: %(default)s)")
    add("--host", default="", help="what other machines call this one (default: its name, or the address of --bind)")
    add("--data-folder", default="", metavar="FOLDER", help="keeps the dispatcher's state, for a restart of it")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"expected a port from 0 to {_HIGHEST_PORT}, found {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of workers, found {text!r}")
    return int(text)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected an IP address of this machine, found {text!r}") from error


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see _RUNNING
