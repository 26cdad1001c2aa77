"""The few fields of TensorFlow's service messages that tfopt reads; TensorFlow ships no Python classes for them.

Protobuf keeps a field's number for ever: what TensorFlow adds later is passed over.
"""

from collections.abc import Iterator

_LENGTH_DELIMITED, _VARINT, _FIXED64, _FIXED32 = 2, 0, 1, 5


def worker_addresses(answer: bytes) -> list[str]:
    """Returns the addresses of the workers in a `GetWorkersResponse`."""
    return [_address(value) for number, value in _fields(answer) if number == 1 and isinstance(value, bytes)]


def client_number(request: bytes) -> int:
    """Returns which iterator sends a `ClientHeartbeatRequest` or a `ReleaseIterationClientRequest`."""
    return next((value for number, value in _fields(request) if number == 1 and isinstance(value, int)), 0)


def heartbeat_workers(answer: bytes) -> tuple[list[str], bool]:
    """Returns the workers that have a part in an iteration, and whether it is over, of a `ClientHeartbeatResponse`."""
    fields = list(_fields(answer))
    addresses = [_address(value) for number, value in fields if number == 1 and isinstance(value, bytes)]
    return addresses, any(number == 2 and value == 1 for number, value in fields)


def _address(worker: bytes) -> str:
    """The first field of `WorkerInfo` and of `TaskInfo`."""
    return next(value.decode() for number, value in _fields(worker) if number == 1 and isinstance(value, bytes))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in protobuf's wire format: their numbers and values."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        value: int | bytes
        if kind == _VARINT:
            value, at = _varint(message, at)
        else:
            size, at = _varint(message, at) if kind == _LENGTH_DELIMITED else ({_FIXED64: 8, _FIXED32: 4}[kind], at)
            value, at = message[at : at + size], at + size
        yield number, value


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
