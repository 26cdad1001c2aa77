"""What tests have done in processes of their own."""

import os
import signal
import subprocess
import sys
import time


def add(send, a, b):
    for number in (a, b):
        send(number)
    return a + b


def sees(send, path):
    send(path)
    return os.path.exists(path)


def surroundings(send):
    print("not for standard output")
    return os.environ.get("TFOPT_TEST"), os.getcwd(), os.getpid()


def value_error(send):
    raise ValueError("wrong value")


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def no_pickle(send):
    raise TwoArgumentsError("one", "two")


def sleep(send, seconds):
    send(os.getpid())
    time.sleep(seconds)


def end(send, how):
    if how == "exit":
        sys.stdout.flush()
        os._exit(7)
    os.kill(os.getpid(), signal.SIGKILL)


def writes(send):
    for line in (
        b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n",
        b"I0000 00:00:1795633731.993833   20433 port.cc:153] oneDNN custom operations are on.\n",
        b"2026-11-25 19:08:57.123456: W tensorflow/core/x.cc:1] something\n",
        b"UserWarning: mine\n",
    ):
        os.write(2, line)
    subprocess.run(["echo", "from a child"])
    os.write(1, b"the last line")


def write_for_ever(send):
    while True:
        os.write(1, b"y\n" * 1000)
