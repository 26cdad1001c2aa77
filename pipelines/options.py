"""What a user may set about a pipeline, checked when it is made."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

from tfopt.errors import unknown_name

Cache = Literal["auto", "memory"] | None
Remainder = Literal["drop", "keep"]
Prefetch = Literal["auto"] | int


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The arguments of `plan_pipeline` behind its first, with their defaults filled in.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is out of range or no known name.

    Example:
        >>> PipelineOptions.fill_in(training=False).remainder
        'keep'
    """

    batch_size: int
    training: bool
    transform: Callable[..., Any] | None
    augment: Callable[..., Any] | None
    cache: Cache
    shuffle: bool
    seed: int | None
    remainder: Remainder
    prefetch: Prefetch

    @classmethod
    def fill_in(
        cls,
        *,
        batch_size: int = 256,
        training: bool = True,
        transform: Callable[..., Any] | None = None,
        augment: Callable[..., Any] | None = None,
        cache: Cache = "auto",
        shuffle: bool | None = None,
        seed: int | None = None,
        remainder: Remainder | None = None,
        prefetch: Prefetch = "auto",
    ) -> Self:
        """Returns the options; where `shuffle` and `remainder` are None, `training` decides."""
        return cls(
            batch_size=batch_size,
            training=training,
            transform=transform,
            augment=augment,
            cache=cache,
            shuffle=training if shuffle is None else shuffle,
            seed=seed,
            remainder=("drop" if training else "keep") if remainder is None else remainder,
            prefetch=prefetch,
        )

    def __post_init__(self) -> None:
        _expect_int("batch_size", self.batch_size, least=1)
        for name in ("training", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"Expected a bool for `{name}`. Received: {getattr(self, name)!r}")
        for name in ("transform", "augment"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise TypeError(f"Expected a function for `{name}`. Received: {value!r}")
        _expect_name("cache", self.cache, ("auto", "memory", None))
        _expect_name("remainder", self.remainder, ("drop", "keep"))
        if self.seed is not None:
            _expect_int("seed", self.seed, least=0)
        if isinstance(self.prefetch, str):
            _expect_name("prefetch", self.prefetch, ("auto",))
        else:
            _expect_int("prefetch", self.prefetch, least=0)

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON values; functions by name."""
        functions = {name: getattr(self, name) for name in ("transform", "augment")}
        names = ("batch_size", "training", "cache", "shuffle", "seed", "remainder", "prefetch")
        return {name: getattr(self, name) for name in names} | {
            name: None if function is None else function_name(function) for name, function in functions.items()
        }


def function_name(function: Callable[..., Any]) -> str:
    """Returns what to call a function, or an object that is called like one."""
    inner = getattr(function, "func", function)  # functools.partial
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _expect_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Expected an int for `{name}`. Received: {value!r}")
    if value < least:
        raise ValueError(f"Expected `{name}` to be at least {least}. Received: {value}")


def _expect_name(name: str, value: object, valid: tuple[str | None, ...]) -> None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"Expected a name for `{name}`. Received: {value!r}")
    if value not in valid:
        listed = [name if name is not None else "None" for name in valid]
        raise unknown_name(f"value for `{name}`", value, listed)
