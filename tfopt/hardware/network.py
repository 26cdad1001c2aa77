"""What has gone over the network interfaces."""

import psutil

LOOPBACK = "lo"


def sent_bytes(interface: str = LOOPBACK) -> int | None:
    """Returns how many bytes an interface has sent since the machine was started, of all its processes together.

    Args:
        interface: Its name. Default: the one between processes of this machine, as Linux calls it.

    Returns:
        None where there is no such interface, or the system does not say.
    """
    try:
        counters = psutil.net_io_counters(pernic=True)
    except (psutil.Error, OSError):
        return None
    return int(counters[interface].bytes_sent) if interface in counters else None
