"""What children do in tests."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress


def echo(connection):
    """Sends back what it receives."""
    with suppress(EOFError):
        while True:
            connection.send(connection.recv())


def looks_around(connection):
    connection.send((os.environ["TFOPT_TEST"], sys.path, sys.stdin.read(), os.getsid(0) == os.getpid()))


def writes(connection):
    """Writes what it receives."""
    with suppress(EOFError):
        while True:
            os.write(1, connection.recv())
            connection.send("written")


def writes_both(connection):
    print("first")
    sys.stderr.write("second\n")
    print("third")
    connection.send("written")


def ends(connection):
    """Ends as it is told to."""
    how = connection.recv()
    if how == "raise":
        raise ZeroDivisionError("of its own making")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(how)


def sleeps(connection):
    connection.send("asleep")
    time.sleep(600)


def starts_others(connection):
    """Leaves a fork, which holds the connection, and another program, which holds the outputs; ends when told to."""
    fork = os.fork()
    if not fork:
        time.sleep(600)
    connection.send((fork, subprocess.Popen(["sleep", "600"]).pid))
    connection.recv()
    os._exit(3)


def works(connection):
    """A worker of a `Group`, without TensorFlow."""
    connection.recv()
    connection.send({name: os.environ[name] for name in ("TF_CONFIG", "CUDA_VISIBLE_DEVICES")} | {"pid": os.getpid()})
    with suppress(EOFError):
        while True:
            call, arguments = connection.recv()
            if call == "fail":
                raise ZeroDivisionError("of its own making")
            if call != "ignore":
                connection.send({"call": call, "arguments": arguments})
