"""Non-blocking messages between processes: one line of JSON each, over a socket."""

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, TypeVar

# Messages are short; anything longer is not one.
LINE_BYTES = 4096

# Keeps SIGPIPE, if a program restored its default action, from killing the process. macOS lacks the flag.
_NO_SIGPIPE = getattr(socket, "MSG_NOSIGNAL", 0)


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


Source = TypeVar("Source", bound=_HasFileno)


def readable(sources: Iterable[Source], wait_seconds: float) -> list[Source]:
    """Waits until one of several channels, sockets or pipes has data or its other end is closed; returns all that do.

    Sources closed on this side are ignored. Returns an empty list when the time is up; 0 or less does not wait.
    """
    # Not select.select: it rejects descriptors above 1,023, and a training process may have that many open.
    with selectors.PollSelector() as selector:
        for source in sources:
            if source.fileno() >= 0:
                selector.register(source, selectors.EVENT_READ, source)
        return [key.data for key, _ in selector.select(wait_seconds)]


class Channel:
    """Sends and receives messages (dicts) over a connected stream socket, which it takes over, without ever blocking.

    A line longer than `line_bytes` closes the channel, as does anything that is not a message.

    Example:
        >>> ours, theirs = map(Channel, socket.socketpair())
        >>> theirs.send(beat=1)
        >>> list(ours.receive())
        [{'beat': 1}]
    """

    def __init__(self, connection: socket.socket, *, line_bytes: int = LINE_BYTES):
        connection.setblocking(False)
        self.closed = False  # the other end is gone or sent garbage; nothing is sent or received any more
        self.garbage = b""  # the start of what came in place of a message
        self.heard_at = time.monotonic()
        self._socket = connection
        self._line_bytes = line_bytes
        self._rest = b""
        self._messages: deque[dict[str, Any]] = deque()

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._socket.fileno()

    def send(self, **message: Any) -> None:
        """Sends a message. If the buffer is full, the reader has hung for minutes and the channel closes."""
        if self.closed:
            return
        line = json.dumps(message).encode() + b"\n"
        try:
            if self._socket.send(line, _NO_SIGPIPE) < len(line):
                self.close()
        except BlockingIOError:
            self.close()
        except OSError:  # the other end is gone, but what it sent before can still be read
            pass

    def receive(self) -> Iterator[dict[str, Any]]:
        """Returns the messages received so far. Those left in the iterator come with the next call."""
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
            message = _parse(line) if len(line) <= self._line_bytes else None
            if message is None:
                self.garbage = line[:80] or b"\n"
                self.close()
                break
            self._messages.append(message)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None
