"""Checks this host before TensorFlow starts, for problems that would later hang it or fail without a reason."""

import errno
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tfopt.distribute.cluster.membership import Address, Cluster, cluster_error
from tfopt.distribute.watchdog.barrier import MissingPeerError, listen_everywhere, pauses
from tfopt.hardware.host_activity import port_holder
from tfopt.text import listed

_LONGEST_PAUSE_SECONDS = 4.0


def check_host(cluster: Cluster, *, deadline_seconds: float = 10.0) -> None:
    """Checks that this worker's and the chief's names resolve, that the former is this machine, and its port is free.

    The other names are their workers' to check: if all asked for all, hundreds would overload the DNS server.
    TensorFlow itself waits over ten minutes for a peer it cannot reach, and reports a taken port only as "Could not
    start gRPC server". For one process there is nothing to check.

    Raises:
        MissingPeerError: If one of the two names does not resolve by the deadline.
        ClusterError: If this worker's address is another machine's, or its port is taken.
    """
    if not cluster.workers:
        return
    addresses = cluster.addresses()
    own = addresses[cluster.index]
    needed = {0: addresses[0], cluster.index: own}
    answers = look_up((address.host for address in needed.values()), deadline_seconds=deadline_seconds)
    _check_names(needed, answers, deadline_seconds)
    _check_own(cluster, own.host, answers)
    _check_port(cluster, own.port)


@dataclass(slots=True)
class Answers:
    """Results of looking up host names."""

    found: dict[str, list[tuple[int, tuple[Any, ...]]]] = field(default_factory=dict)
    """Name → addresses: the family, and what `socket.bind` takes."""
    failed: dict[str, str] = field(default_factory=dict)
    """Name → reason of its last failure."""


def look_up(hosts: Iterable[str], *, deadline_seconds: float) -> Answers:
    """Looks up names or IP addresses at once, and retries those that fail, ever less often, until the deadline."""
    ends = time.monotonic() + deadline_seconds
    last_try = ends - deadline_seconds / 20  # leaves time for its answer
    answers = Answers()
    # Not a ThreadPoolExecutor: a DNS query cannot be interrupted, and Python joins an executor's threads at exit.
    threads = [
        threading.Thread(target=_work, args=(host, answers, last_try), name="tfopt-names", daemon=True)
        for host in dict.fromkeys(hosts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, ends - time.monotonic()))
    return Answers(dict(answers.found), dict(answers.failed))


def _work(name: str, answers: Answers, last_try: float) -> None:
    for pause in pauses(_LONGEST_PAUSE_SECONDS):
        try:
            known = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            answers.found[name] = [(family, address) for family, _, _, _, address in known]
            return
        except (OSError, UnicodeError) as error:  # UnicodeError: two dots in a row, a label of over 63 characters
            answers.failed[name] = getattr(error, "strerror", None) or str(error)
        left = last_try - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(pause, left))


def _check_names(needed: dict[int, Address], answers: Answers, deadline_seconds: float) -> None:
    missing = [
        f"{address.host} of worker {rank} ({answers.failed.get(address.host, 'no answer')})"
        for rank, address in needed.items()
        if address.host not in answers.found
    ]
    if missing:
        raise MissingPeerError(  # a Kubernetes pod has a name only once it has started
            "Expected the host names of this worker and of the chief, worker 0, to resolve within "
            f"{deadline_seconds:g} s. Found unresolved: {', '.join(missing)}. What to do: correct the names, or make "
            "them known here (DNS, /etc/hosts)."
        )


def _check_own(cluster: Cluster, host: str, answers: Answers) -> None:
    name = socket.gethostname()
    # Behind address translation, only the name identifies a machine.
    if host.lower() == name.lower() or any(_is_local(*answer) for answer in answers.found[host]):
        return
    known = dict.fromkeys(str(address[0]) for _, address in answers.found[host])
    raise cluster_error(
        f"{cluster.address}, the address of worker {cluster.index} (this process), to be this machine's",
        f"{host} is {listed(list(known), 3)}, which this machine ({name}) does not have",
        "start each worker on its own host, or correct this process's index",
    )


def _is_local(family: int, address: tuple[object, ...]) -> bool:
    """Whether an interface of this machine has the address; the kernel binds no other."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _check_port(cluster: Cluster, port: int) -> None:
    try:
        listen_everywhere(port).close()
    except OSError as error:
        holder = port_holder(port) if error.errno == errno.EADDRINUSE else None
        raise cluster_error(
            f"port {port} of {cluster.address}, the address of worker {cluster.index}, to be free",
            f"{os.strerror(error.errno or 0)}{f'; {holder} listens there' if holder else ''}",
            "end the process that holds it (an earlier run?), or give the worker another port, above 1023",
        ) from error
