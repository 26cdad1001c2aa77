"""A port of this machine, taken as TensorFlow's server takes it."""

import socket


def listen_everywhere(port: int, *, backlog: int = 1) -> socket.socket:
    """Returns a socket that listens on a port on all interfaces, whatever address the worker has.

    TensorFlow's server does the same, so that a port which this takes is free for it, once this is closed.

    Args:
        port: 1 to 65535; 0: any that is free.
        backlog: How many connections may wait to be accepted.

    Raises:
        OSError: The port is taken, or this user may not have it.

    Example:
        >>> with listen_everywhere(0) as listener:
        ...     port = listener.getsockname()[1]
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=both)
