"""The options of a pipeline, checked when they are made."""

import dataclasses
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypedDict

from tfopt import checks
from tfopt.errors import unknown_name
from tfopt.pipelines.shared.crop import CentralCrop, RandomCrop
from tfopt.pipelines.shared.layer_function import LayerFunction

Cache = Literal["auto", "memory", "device"] | os.PathLike[str] | str | None
CacheAfter = Literal["auto", "decode", "transform"]
CropWith = str | int | Sequence[str | int] | Mapping[str | int, bool]
Remainder = Literal["drop", "keep", "pad"]
Prefetch = Literal["auto"] | int
OnBadFile = Literal["raise", "skip"]
Padding = Literal["batch"] | None
Shares = Literal["classes"] | Mapping[str | int, float]

_AUTOTUNE = -1  # tf.data.AUTOTUNE
_CACHE_NAMES = ("auto", "memory", "device")
_MOST_LEFT_OUT_PERCENT = 5  # of the examples of an epoch, unless remainder="drop" was asked for
_SERVICE = re.compile(r"grpc://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[1-9][0-9]{0,4}")


@dataclasses.dataclass(frozen=True, slots=True)
class StageFunction:
    """A function that a stage calls on each example, or on each batch."""

    stage: str
    call: Callable[..., Any]  # called as `Dataset.map` calls its function
    seeded: bool = False  # whether it gets a keyword `seed`
    by_batch: bool = False  # whether it takes whole batches
    name: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", function_name(self.call))


def per_batch(function: Callable[..., Any]) -> StageFunction:
    """Marks a function of `augment` or `transform` that takes a whole batch instead of one example.

    In `augment` it gets the batches that are trained on, as MixUp needs. In `transform` it must treat each example
    independently, since a batch may hold any number of them; for small examples that is many times as fast as one by
    one.

    Args:
        function: Takes a batch, called as `Dataset.map` calls its function; in `augment` a keyword `seed` gets a seed
            for the batch, as `plan_pipeline` describes.

    Raises:
        TypeError: If `function` is not callable.

    Example:
        >>> import numpy as np
        >>> data = np.zeros((100, 4), "float32"), np.zeros(100, "float32")
        >>> dataset = build_pipeline(data, batch_size=10, augment=per_batch(lambda x, y: (x[::-1], y[::-1])))
    """
    if not callable(function):
        raise TypeError(f"Expected a function for per_batch. Received: {function!r}. Pass a function of a batch.")
    return StageFunction("augment", function, _takes_seed(function), by_batch=True)


class Choices(TypedDict, total=False):
    """The options as keywords, for type checkers and editors; `PipelineOptions` has their defaults."""

    batch_size: int
    training: bool
    crop: RandomCrop | CentralCrop | None
    crop_with: CropWith
    transform: Callable[..., Any] | StageFunction | None
    augment: Callable[..., Any] | StageFunction | Sequence[Callable[..., Any] | StageFunction] | None
    cache: Cache
    cache_after: CacheAfter
    cache_key: str | None
    cache_limit_gib: float | None
    shuffle: bool | None
    balance: Shares | None
    seed: int | None
    split: float | None
    pack: int | None
    pad: Padding
    bucket: bool
    remainder: Remainder | None
    prefetch: Prefetch
    service: str | None
    device: str | None
    on_bad_file: OnBadFile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options of `plan_pipeline`, which describes them; once made, `shuffle` is never None.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range or an unknown name.

    Example:
        >>> PipelineOptions(training=False).shuffle
        False
    """

    batch_size: int = 256
    training: bool = True
    crop: RandomCrop | CentralCrop | None = None
    crop_with: CropWith = ()
    transform: Callable[..., Any] | StageFunction | None = None
    augment: Callable[..., Any] | StageFunction | Sequence[Callable[..., Any] | StageFunction] | None = None
    cache: Cache = "auto"
    cache_after: CacheAfter = "auto"
    cache_key: str | None = None
    cache_limit_gib: float | None = None
    shuffle: bool | None = None
    balance: Shares | None = None
    seed: int | None = None
    split: float | None = None
    pack: int | None = None
    pad: Padding = None
    bucket: bool = False
    remainder: Remainder | None = None
    prefetch: Prefetch = "auto"
    service: str | None = None
    device: str | None = "auto"
    on_bad_file: OnBadFile = "raise"

    def __post_init__(self) -> None:
        fill_in = functools.partial(object.__setattr__, self)
        _expect_bool("training", self.training)
        if self.shuffle is None:
            fill_in("shuffle", self.training)
        _expect_bool("shuffle", self.shuffle)
        if self.remainder is not None:
            expect_name("remainder", self.remainder, ("drop", "keep", "pad"))
        _expect_crop(self.crop)
        fill_in("crop_with", parts_that_move("crop_with", self.crop_with))
        if self.crop_with and self.crop is None:
            raise ValueError(
                "Expected a `crop` for `crop_with`. Found crop=None. Pass crop=RandomCrop(224), or leave it out."
            )
        _expect_transform(self.transform)
        fill_in("cache", _cache(self.cache))
        fill_in("augment", _augment_functions(self.augment, on_device=self.on_device))
        for before, function in pairwise(self.augmentations):
            if before.by_batch and not function.by_batch:
                raise ValueError(
                    "Expected functions of single examples before those of batches in `augment`. Received: "
                    f"{function.name} after per_batch({before.name}). Move it forward."
                )
        expect_name("cache_after", self.cache_after, ("auto", "decode", "transform"))
        _expect_text("cache_key", self.cache_key)
        if self.cache_limit_gib is not None:
            checks.number("cache_limit_gib", self.cache_limit_gib, "Pass GiB, such as 100.", above=0)
        _expect_text("device", self.device)
        _expect_service(self.service)
        expect_name("on_bad_file", self.on_bad_file, ("raise", "skip"))
        fill_in("batch_size", checks.integer("batch_size", self.batch_size, "Pass a number of examples.", least=1))
        if self.seed is not None:
            fill_in("seed", checks.integer("seed", self.seed, "Pass a whole number, such as 1.", least=0))
        if self.split is not None:
            share = checks.number("split", self.split, "Pass the share to validate on, such as 0.1.", above=0)
            if share >= 1:
                raise ValueError(f"Expected split to be below 1. Received: {self.split!r}. Pass a share, such as 0.1.")
        if self.pack is not None:
            fill_in("pack", checks.integer("pack", self.pack, "Pass the tokens of a row, such as 1024.", least=2))
        self._fill_in_padding(fill_in)
        self._fill_in_balance(fill_in)
        if isinstance(self.prefetch, str):
            expect_name("prefetch", self.prefetch, ("auto",))
        elif self.prefetch == _AUTOTUNE:
            fill_in("prefetch", "auto")
        else:
            batches = checks.integer("prefetch", self.prefetch, "Pass a number of batches.", least=0)
            fill_in("prefetch", min(batches, 2**31))

    def _fill_in_padding(self, fill_in: Callable[[str, Any], None]) -> None:
        _expect_bool("bucket", self.bucket)
        if self.pad is not None:
            expect_name("pad", self.pad, ("batch",))
        if self.bucket and not self.shuffle:
            raise ValueError(
                "Expected a shuffle for bucket=True, which changes the order of examples. Found "
                f"training={self.training} and shuffle={self.shuffle}. Pass pad='batch' in place of `bucket`."
            )
        if self.bucket and self.service is not None:
            raise ValueError(
                "Expected no `service` for bucket=True, since each of its workers sees other examples. Pass "
                "pad='batch' in place of `bucket`."
            )
        if self.pack is not None and (self.pad or self.bucket):
            raise ValueError(
                "Expected `pack`, or `pad` and `bucket`. Found both, and packed rows have one length. Leave out one."
            )
        if self.bucket:
            fill_in("pad", "batch")

    def _fill_in_balance(self, fill_in: Callable[[str, Any], None]) -> None:
        if self.balance is None:
            return
        if isinstance(self.balance, str):
            expect_name("balance", self.balance, ("classes",))
        elif not isinstance(self.balance, Mapping):
            raise TypeError(
                f"Expected 'classes', or the share of each class, for `balance`. Received: {self.balance!r}. Pass a "
                "dict such as {'cat': 0.5, 'dog': 0.5}."
            )
        else:
            shares = {
                getattr(key, "item", lambda key=key: key)(): checks.number(
                    f"balance[{key!r}]", share, "Pass the share of a class.", least=0
                )
                for key, share in self.balance.items()
            }
            fill_in("balance", shares)
            if not any(shares.values()):
                raise ValueError("Expected a share above 0 for `balance`. Received only zeros. Pass 'classes'.")
        conflicts = {
            "shuffle=True": not self.shuffle and f"training={self.training} and shuffle={self.shuffle}",
            "cache=None": self.cache not in ("auto", None) and f"cache={self.cache!r}, which keeps each example once",
            "no `service`": self.service is not None and f"service={self.service!r}",
            "no `pack`": self.pack is not None and f"pack={self.pack}",
            "no `bucket`": self.bucket and "bucket=True, which orders examples by length",
        }
        for expected, found in conflicts.items():
            if found:
                raise ValueError(
                    f"Expected {expected} for `balance`, which decides the order of examples. Found {found}. Leave "
                    "one of the two out."
                )

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON values; functions by name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values |= {
            "crop": None if self.crop is None else repr(self.crop),
            "transform": None if self.transformation is None else self.transformation.name,
            "augment": [function.name for function in self.augmentations],
        }
        return values

    @property
    def augmentations(self) -> tuple[StageFunction, ...]:
        """The functions of `augment`, in order."""
        return self.augment  # type: ignore[return-value]  # a tuple once made

    @property
    def transformation(self) -> StageFunction | None:
        """The function of `transform`."""
        if self.transform is None:
            return None
        by_batch = isinstance(self.transform, StageFunction)
        call = self.transform.call if isinstance(self.transform, StageFunction) else self.transform
        return StageFunction("transform", call, by_batch=by_batch)

    @property
    def crops_with(self) -> dict[str, bool]:
        """The option `crop_with`: paths of parts of an example, and whether each moves with the image."""
        return self.crop_with  # type: ignore[return-value]  # a dict once made

    @property
    def on_device(self) -> bool:
        """Whether cache="device" was asked for."""
        return self.cache == "device"

    @property
    def cache_folder(self) -> str | None:
        """The folder that `cache` names, or None."""
        return self.cache if isinstance(self.cache, str) and self.cache not in _CACHE_NAMES else None


def choose_remainder(
    options: PipelineOptions, count: int | None, left_out: int | None, *, mixed: bool
) -> tuple[Remainder, str]:
    """Returns the option `remainder`, or what suits the data if it was not given; and why.

    Args:
        count: Examples in an epoch; None if unknown.
        left_out: How many of them "drop" leaves out; None if unknown.
        mixed: Whether each epoch leaves out others.
    """
    if options.remainder is not None:
        return options.remainder, f"remainder={options.remainder!r}"
    if not options.training:
        return "keep", "training=False"
    if not options.shuffle:
        return "keep", "shuffle=False would leave out the same ones of every epoch"
    if left_out is None:
        return "keep", "their number is unknown"
    if count and 100 * left_out > _MOST_LEFT_OUT_PERCENT * count:
        return "keep", f"to drop {left_out:,} of {count:,} would be more than {_MOST_LEFT_OUT_PERCENT} % of each epoch"
    if left_out and not mixed:
        return "keep", "the shuffle's buffer does not hold them all, and would leave out mostly the last ones"
    return "drop", "each epoch leaves out others"


def is_layer(function: Any) -> bool:
    """Whether this is a Keras layer, without importing Keras."""
    return any(base.__name__ == "Layer" for base in type(function).__mro__)


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of a callable object."""
    of_partial = getattr(function, "func", function)
    inner = function.layer if isinstance(function, LayerFunction) else of_partial
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _expect_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"Expected a bool for `{name}`. Received: {value!r}. Pass True or False.")


def _expect_transform(value: Any) -> None:
    if isinstance(value, StageFunction) and value.seeded:
        raise ValueError(
            f"Expected a deterministic `transform`. {value.name} takes a seed. Pass it as an `augment`, which runs "
            "again in each epoch."
        )
    if value is not None and not isinstance(value, StageFunction) and not callable(value):
        raise TypeError(
            f"Expected a function for `transform`. Received: {value!r}. Pass a function of an example, per_batch of "
            "one of a batch, or None."
        )


def _augment_functions(value: Any, *, on_device: bool) -> tuple[StageFunction, ...]:
    """Returns one function, or a sequence of them, as a tuple; with cache="device" Keras layers take whole batches."""
    functions = []
    single = () if value is None else (value,)
    for given in value if isinstance(value, list | tuple) else single:
        function = given.call if isinstance(given, StageFunction) else given
        if not callable(function):
            raise TypeError(
                f"Expected functions for `augment`. Received: {given!r}. Pass a function or a list of them."
            )
        if is_layer(function) and on_device:
            functions.append(per_batch(LayerFunction(function)))
        elif isinstance(given, StageFunction):
            functions.append(given)
        else:
            functions.append(StageFunction("augment", function, _takes_seed(function)))
    return tuple(functions)


def _takes_seed(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter `seed` that can be passed by keyword."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions have no signature
        return False
    keyword = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return "seed" in parameters and parameters["seed"].kind in keyword


def _cache(value: Any) -> str | None:
    """Returns the option `cache`, a folder as an absolute path."""
    if value is None or (isinstance(value, str) and value in _CACHE_NAMES):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            'Expected "auto", "memory", "device", the path of a folder or None for `cache`. Received: '
            f'{value!r}. Pass "memory" to cache in memory.'
        )
    path = os.fspath(value)
    if not isinstance(path, str) or "://" in path or "\0" in path or not path.isprintable() or not path:
        raise ValueError(
            f"Expected the path of a local folder for `cache`. Received: {value!r}. Pass a folder on a disk of this "
            "machine, such as './cache'."
        )
    # A bare word is more likely a misspelt name than a folder.
    if isinstance(value, str) and os.sep not in path and not path.startswith((".", "~")):
        raise ValueError(
            'Expected "auto", "memory", "device", the path of a folder or None (without quotes) for `cache`. Received: '
            f"{value!r}. For a folder of that name pass {'.' + os.sep + path!r}."
        )
    return os.path.abspath(os.path.expanduser(path))


def _expect_crop(value: object) -> None:
    if value is not None and not isinstance(value, RandomCrop | CentralCrop):
        raise TypeError(
            f"Expected RandomCrop or CentralCrop of tfopt.pipelines for `crop`. Received: {value!r}. Pass "
            "RandomCrop(224), or a function of your own as `transform` or `augment`."
        )


def parts_that_move(option: str, value: Any) -> dict[str, bool]:
    """Returns an option such as `crop_with` as paths of parts of an example, and whether each moves with the image."""
    names = (value,) if isinstance(value, str | int) else value
    if not isinstance(names, Sequence | Mapping) or not all(isinstance(name, str | int) for name in names):
        raise TypeError(
            f"Expected names for `{option}`. Received: {value!r}. Pass the keys of masks, images and boxes, or their "
            "positions in a tuple, such as ('mask', 'boxes')."
        )
    return {str(name): bool(names[name]) if isinstance(names, Mapping) else True for name in names}


def _expect_text(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise TypeError(f"Expected a string for `{name}`. Received: {value!r}. Pass a string, or None.")


def _expect_service(value: object) -> None:
    _expect_text("service", value)
    if isinstance(value, str) and not _SERVICE.fullmatch(value):
        raise ValueError(
            f"Expected 'grpc://host:port' for `service`. Received: {value!r}. Pass the address that "
            "`python -m tfopt.pipelines.serve` prints."
        )


def expect_name(name: str, value: object, valid: tuple[str, ...]) -> None:
    """Refuses a value of an option that is not among the valid names."""
    if not isinstance(value, str):
        raise TypeError(f"Expected a name for `{name}`. Received: {value!r}. Pass {' or '.join(map(repr, valid))}.")
    if value not in valid:
        raise unknown_name(f"value for `{name}`", value, valid)
