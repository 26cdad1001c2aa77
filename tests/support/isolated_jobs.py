"""What tests have done in processes of their own."""

import os
import signal
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
