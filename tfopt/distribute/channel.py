"""Messages between processes: one line of JSON each, over a socket that nobody waits for."""

import json
import select
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

# A message is a few words long. What is longer comes from someone else.
LINE_BYTES = 4096

# Whoever has given SIGPIPE back its default action must not die of a peer that went away. macOS lacks the flag.
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


Source = TypeVar("Source", bound=_HasFileno)


def readable(sources: Iterable[Source], wait_seconds: float) -> list[Source]:
    """Waits until something can be read from one of several channels, sockets or pipes.

    Args:
        sources: What to wait for. Closed ones are left out.
        wait_seconds: How long to wait at most; 0 or less: not at all.

    Returns:
        Those that something has come from, or whose other end has gone; none if the time is over.

    Example:
        >>> readable([channel], 0.5)
        []
    """
    by_descriptor = {source.fileno(): source for source in sources if source.fileno() >= 0}
    poll = select.poll()  # select.select() knows descriptors below 1,024 only, and a training process may have more
    for descriptor in by_descriptor:
        poll.register(descriptor, select.POLLIN)
    return [by_descriptor[descriptor] for descriptor, _ in poll.poll(max(0.0, wait_seconds) * 1000)]


class Channel:
    """Sends and receives messages (dicts) over a connected socket, and never waits.

    Args:
        connection: A connected stream socket. It belongs to the channel from now on.
        line_bytes: How long a line may be. A longer one closes the channel, as does anything that is no message.

    Attributes:
        closed: Whether the other end has gone or spoken nonsense. Nothing comes or goes any more.
        nonsense: What came instead of a message, if something did.
        heard_at: When something came last, by the monotonic clock.

    Example:
        >>> ours, theirs = map(Channel, socket.socketpair())
        >>> theirs.send(beat=1)
        >>> list(ours.receive())
        [{'beat': 1}]
    """

    def __init__(self, connection: socket.socket, *, line_bytes: int = LINE_BYTES):
        connection.setblocking(False)
        self.closed = False
        self.nonsense = b""
        self.heard_at = time.monotonic()
        self._socket = connection
        self._line_bytes = line_bytes
        self._rest = b""
        self._messages: deque[dict[str, Any]] = deque()

    def fileno(self) -> int:
        """The socket's file descriptor, by which selectors know it."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message. What cannot be sent at once closes the channel: its reader has hung for minutes."""
        if self.closed:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            if self._socket.send(line, _NO_SIGPIPE) < len(line):
                self.close()
        except BlockingIOError:
            self.close()
        except OSError:  # the other end has gone; what it said before can still be read
            pass

    def receive(self) -> Iterator[dict[str, Any]]:
        """Returns the messages that have come. What is not taken from the iterator comes with the next call."""
        if not self.closed:
            self._read()
        return (self._messages.popleft() for _ in range(len(self._messages)))

    def close(self) -> None:
        """Closes the socket. A second call does nothing."""
        self.closed = True
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.heard_at = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > self._line_bytes:
            lines.append(self._rest)
        for line in lines:
            message = _message(line) if len(line) <= self._line_bytes else None
            if message is None:
                self.nonsense = line[:80] or b"\n"
                self.close()
                break
            self._messages.append(message)


def _message(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
