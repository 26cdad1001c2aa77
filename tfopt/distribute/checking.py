"""Checks on this host, before TensorFlow starts, what would otherwise hang or fail there without a reason."""

import errno
import os
import socket

from tfopt.distribute.addresses import Address
from tfopt.distribute.barrier import MissingPeerError
from tfopt.distribute.cluster import Cluster
from tfopt.distribute.listening import listen_everywhere
from tfopt.distribute.names import Answers, look_up
from tfopt.errors import ClusterError
from tfopt.hardware.ports import port_holder
from tfopt.text import listed


def check_host(cluster: Cluster, *, deadline_seconds: float = 10.0) -> None:
    """Checks that all workers' names resolve, that this worker's is this machine, and that its port is free.

    Call it before TensorFlow's server starts: TensorFlow waits over ten minutes for a peer that it cannot reach, and
    says of a port that is taken only "Could not start gRPC server". Nothing is checked for one process.

    Args:
        cluster: From `resolve()`.
        deadline_seconds: How long the names may take to resolve, all together.

    Raises:
        MissingPeerError: A name does not resolve.
        ClusterError: Names which of the others is not so.

    Example:
        >>> check_host(resolve({}))
    """
    if not cluster.workers:
        return
    addresses = cluster.addresses()
    answers = look_up((address.host for address in addresses), deadline_seconds=deadline_seconds)
    _check_names(addresses, answers, deadline_seconds)
    own = addresses[cluster.index]
    _check_own(cluster, own.host, answers)
    _check_port(cluster, own.port)


def _check_names(addresses: list[Address], answers: Answers, deadline_seconds: float) -> None:
    missing = [
        f"{address.host} of worker {rank} ({answers.failed.get(address.host, 'no answer')})"
        for rank, address in enumerate(addresses)
        if address.host not in answers.found
    ]
    if missing:
        raise MissingPeerError(  # in Kubernetes a pod has a name once it has started
            f"Expected the names of all {len(addresses)} workers' hosts to resolve within {deadline_seconds:g} s. "
            f"Found: not so for {listed(missing, 5)}. What to do: correct the names, or make them known here (DNS, "
            "/etc/hosts)."
        )


def _check_own(cluster: Cluster, host: str, answers: Answers) -> None:
    name = socket.gethostname()
    # A machine behind a translated address is known by its name alone.
    if host.lower() == name.lower() or any(_is_here(*answer) for answer in answers.found[host]):
        return
    known = dict.fromkeys(str(address[0]) for _, address in answers.found[host])
    raise ClusterError(
        f"Expected the address of worker {cluster.index}, {cluster.address}, to be this machine's, since this process "
        f"is that worker. Found: {host} is {listed(list(known), 3)}, which this machine ({name}) does not have. What "
        "to do: start each worker on its own host, or give this process the index of the worker that it is."
    )


def _is_here(family: int, address: tuple[object, ...]) -> bool:
    """Whether one of this machine's interfaces has the address: the kernel binds no other."""
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
        raise ClusterError(
            f"Expected port {port} of {cluster.address}, the address of worker {cluster.index}, to be free. Found: "
            f"{os.strerror(error.errno or 0)}{f'; {holder} listens there' if holder else ''}. What to do: end what "
            "holds it (an earlier run?), or give the worker another port, above 1023."
        ) from error
