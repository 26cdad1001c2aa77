"""What a user may set about a pipeline, checked when it is made."""

import dataclasses
import difflib
import functools
import inspect
import numbers
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

from tfopt.errors import unknown_name

Cache = Literal["auto", "memory"] | None
Remainder = Literal["drop", "keep"]
Prefetch = Literal["auto"] | int

P = ParamSpec("P")
R = TypeVar("R")

_AUTOTUNE = -1  # tf.data.AUTOTUNE
_RENAMED = {"drop_remainder": 'remainder="drop" or remainder="keep"'}


class Choices(TypedDict, total=False):
    """The options as keywords, for type checkers and editors; their defaults stand in `PipelineOptions`."""

    batch_size: int
    training: bool
    transform: Callable[..., Any] | None
    augment: Callable[..., Any] | None
    cache: Cache
    shuffle: bool | None
    seed: int | None
    remainder: Remainder | None
    prefetch: Prefetch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of `plan_pipeline`, which describes them; `shuffle` and `remainder` are never None once made.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range or no known name.

    Example:
        >>> PipelineOptions(training=False).remainder
        'keep'
    """

    batch_size: int = 256
    training: bool = True
    transform: Callable[..., Any] | None = None
    augment: Callable[..., Any] | None = None
    cache: Cache = "auto"
    shuffle: bool | None = None
    seed: int | None = None
    remainder: Remainder | None = None
    prefetch: Prefetch = "auto"

    def __post_init__(self) -> None:
        fill_in = functools.partial(object.__setattr__, self)
        _expect_bool("training", self.training)
        if self.shuffle is None:
            fill_in("shuffle", self.training)
        if self.remainder is None:
            fill_in("remainder", "drop" if self.training else "keep")
        _expect_bool("shuffle", self.shuffle)
        _expect_name("remainder", self.remainder, ("drop", "keep"))
        _expect_function("transform", self.transform)
        _expect_function("augment", self.augment)
        _expect_cache(self.cache)
        fill_in("batch_size", as_int("batch_size", self.batch_size, least=1))
        if self.seed is not None:
            fill_in("seed", as_int("seed", self.seed, least=0))
        if isinstance(self.prefetch, str):
            _expect_name("prefetch", self.prefetch, ("auto",))
        elif self.prefetch == _AUTOTUNE:
            fill_in("prefetch", "auto")
        else:
            fill_in("prefetch", as_int("prefetch", self.prefetch, least=0))

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON values; functions by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: function_name(value) if callable(value) else value for name, value in values.items()}


def takes_options(function: Callable[P, R]) -> Callable[P, R]:
    """Shows the options in the signature of a function `(source, **options)`, and says what to call unknown ones."""
    options = inspect.signature(PipelineOptions).parameters
    stated = inspect.signature(function)

    @functools.wraps(function)
    def checked(*given: P.args, **keywords: P.kwargs) -> R:
        if len(given) > 1:
            raise TypeError(
                f"Expected one source, and options by name. Found {len(given)} arguments without a name. Pass arrays "
                f"that belong together as one tuple: {function.__name__}((x, y), batch_size=...)."
            )
        for name in keywords:
            if name != "source" and name not in options:
                raise _unknown_option(name, list(options))
        return function(*given, **keywords)

    shown = stated.replace(parameters=[stated.parameters["source"], *options.values()])
    object.__setattr__(checked, "__signature__", shown)
    return checked


def function_name(function: Callable[..., Any]) -> str:
    """Returns what to call a function, or an object that is called like one."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def as_int(name: str, value: object, least: int) -> int:
    """Returns a whole number, NumPy's too, as an int.

    Raises:
        TypeError: It is none.
        ValueError: It is less than `least`.
    """
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(
            f"Expected an int for `{name}`. Received: {value!r}. Pass a whole number, such as {max(least, 1)}."
        )
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}. Received: {value}. Pass {least} or more.")
    return int(value)


def _unknown_option(name: str, options: list[str]) -> TypeError:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    meant = _RENAMED.get(name, near[0] if near else "")
    hint = f"Did you mean {meant}?" if meant else "Leave it out."
    return TypeError(f"Expected options among {', '.join(options)}. Found {name!r}. {hint}")


def _expect_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Expected a bool for `{name}`. Received: {value!r}. Pass True or False.")


def _expect_function(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(
            f"Expected a function for `{name}`. Received: {value!r}. Pass a function of an example, or None for none."
        )


def _expect_cache(value: object) -> None:
    if value is None or (isinstance(value, str) and value in ("auto", "memory")):
        return
    error = ValueError if isinstance(value, str) else TypeError
    raise error(
        f'Expected "auto", "memory" or None (without quotes) for `cache`. Received: {value!r}. Pass "memory" to '
        "cache in memory; a cache on disk does not exist yet."
    )


def _expect_name(name: str, value: object, valid: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"Expected a name for `{name}`. Received: {value!r}. Pass {' or '.join(map(repr, valid))}.")
    if value not in valid:
        raise unknown_name(f"value for `{name}`", value, valid)
