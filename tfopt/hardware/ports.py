"""Which process holds a port."""

import psutil


def port_holder(port: int) -> str | None:
    """Returns the process of this machine that holds a TCP port, to be named in an error.

    Args:
        port: 1 to 65535. It is looked for on all interfaces.

    Returns:
        As "python (process 4711)". None where none is found: of another user's processes the system does not tell.

    Example:
        >>> port_holder(22)
        'sshd (process 812)'
    """
    try:
        connections = psutil.net_connections(kind="tcp")
        holders = [c.pid for c in connections if c.laddr and c.laddr.port == port and not c.raddr and c.pid]
        return f"{psutil.Process(holders[0]).name()} (process {holders[0]})" if holders else None
    except (psutil.Error, OSError):
        return None
