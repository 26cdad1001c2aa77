"""The logs of a step: tensors that may not be computed yet, and become numbers when somebody reads them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf
from keras.src.utils.python_utils import pythonify_logs

_UNREAD = object()
_TENSORS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)


def is_settled(logs: Any) -> bool:
    """Whether logs are a dict of tensors, or of such dicts: they stay what they are, whatever the next step changes."""
    return isinstance(logs, dict) and all(isinstance(log, _TENSORS) or is_settled(log) for log in logs.values())


class LazyLogs(dict[str, Any]):
    """A step's logs as Keras hands them to callbacks, floats under sorted keys, converted when a value is first read.

    Reading waits for the step. Length, keys and setting a key do not. The values are those of this step, however late
    they are read.

    Args:
        tensors: What the step returned; a dict in it is flattened, as Keras does.

    Example:
        >>> logs = LazyLogs({"loss": tf.constant(0.5)})
        >>> list(logs), logs["loss"]
        (['loss'], 0.5)
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Any]):
        super().__init__(dict.fromkeys(_flat_keys(tensors), _UNREAD))
        self._tensors: Mapping[str, Any] | None = dict(tensors)

    @property
    def were_read(self) -> bool:
        """Whether the values have been converted."""
        return self._tensors is None

    def read(self) -> "LazyLogs":
        """Converts what is not converted yet, and returns itself."""
        if self._tensors is not None:
            for key, value in pythonify_logs(self._tensors).items():
                # A callback may have put its own value there, or taken the key away.
                if dict.get(self, key) is _UNREAD:
                    dict.__setitem__(self, key, value)
            self._tensors = None
        return self

    # dict(logs) and {**logs} copy the memory of a dict, unread values and all, unless it has an __iter__ of its own.
    def __iter__(self) -> Iterator[str]:
        return dict.__iter__(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self.read()),)


def _reading(name: str) -> Callable[..., Any]:
    """A method of dict that converts the values first."""
    method = getattr(dict, name)

    def read(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        others = [arg.read() if isinstance(arg, LazyLogs) else arg for arg in args]
        return method(self.read(), *others, **kwargs)

    read.__name__, read.__doc__ = name, method.__doc__
    return read


_READERS = ("__getitem__", "get", "items", "values", "pop", "popitem", "setdefault", "copy")
for _name in (*_READERS, "__eq__", "__ne__", "__or__", "__ror__", "__repr__"):
    setattr(LazyLogs, _name, _reading(_name))


def _flat_keys(tensors: Mapping[str, Any]) -> Iterator[str]:
    for key, value in sorted(tensors.items()):
        if isinstance(value, dict):
            yield from _flat_keys(value)
        else:
            yield key
