"""Looks up the names of hosts, all at once and for no longer than a deadline."""

import queue
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# Names of a Kubernetes service appear as its pods start, a moment after this process.
_RETRY_SECONDS = 0.2
_THREADS = 64


@dataclass(slots=True)
class Answers:
    """What came of the names.

    Attributes:
        found: For each name found its addresses: family, and what `socket.bind` takes.
        failed: For each name that was asked for in vain, the last reason.
    """

    found: dict[str, list[tuple[int, tuple[Any, ...]]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def look_up(hosts: Iterable[str], *, deadline_seconds: float) -> Answers:
    """Asks for the addresses of all hosts, and again until each has some or the deadline has passed.

    Args:
        hosts: Names or IP addresses.
        deadline_seconds: How long it may take altogether.
    """
    ends = time.monotonic() + deadline_seconds
    names: queue.SimpleQueue[str] = queue.SimpleQueue()
    for host in dict.fromkeys(hosts):
        names.put(host)
    answers = Answers()
    # A question to DNS cannot be interrupted, so a thread that hangs is left alone: as a daemon it holds nobody up.
    threads = [
        threading.Thread(target=_work, args=(names, answers, ends), name="tfopt-names", daemon=True)
        for _ in range(min(_THREADS, names.qsize()))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return Answers(dict(answers.found), dict(answers.failed))


def _work(names: "queue.SimpleQueue[str]", answers: Answers, ends: float) -> None:
    while time.monotonic() < ends:
        try:
            name = names.get_nowait()
        except queue.Empty:
            return
        try:
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.found[name] = [(family, address) for family, _, _, _, address in known]
        except (OSError, UnicodeError) as error:  # UnicodeError: two dots in a row, a part of over 63 characters
            answers.failed[name] = getattr(error, "strerror", None) or str(error)
            names.put(name)
            time.sleep(_RETRY_SECONDS)
