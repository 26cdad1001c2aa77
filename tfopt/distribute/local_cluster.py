"""A cluster whose workers are all on this machine."""

import contextlib
import json
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def local_cluster(workers: int) -> Iterator[list[str]]:
    """Gives the TF_CONFIG of each worker, by rank. Their ports are held meanwhile.

    Args:
        workers: How many there are.

    Example:
        >>> with local_cluster(2) as configs:
        ...     processes = [Popen(command, env=os.environ | {"TF_CONFIG": config}) for config in configs]
    """
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(_free_port()) for _ in range(workers)]
        addresses = ["{}:{}".format(*port.getsockname()) for port in ports]
        yield [
            json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
            for rank in range(workers)
        ]


def _free_port() -> socket.socket:
    """Takes a free port and holds it, bound but deaf: nobody else is given it before TensorFlow binds it too."""
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as TensorFlow does: both may then be bound
    port.bind(("127.0.0.1", 0))
    return port
