"""Crops of images, random for training and central for evaluation; only the crop of a JPEG is decoded."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import tensorflow as tf

from tfopt import checks
from tfopt.pipelines.shared.elements import without_autograph

_JPEG = b"\xff\xd8\xff"
_WHOLE_IMAGE = (((0.0, 0.0, 1.0, 1.0),),)
# The width in (height, width, channels). Most JPEGs store colours at half the width, and TensorFlow's decoder blends
# them at the sides of a window as if the image ended there, unless the window starts and ends on an odd column or at
# the image's own side: in every other window, a column at the side was off by up to 16 of 255.
_COLUMNS = (0, 1, 0)
# Windows of at most so many times the result's pixels are converted to float32 before they are resized.
_CONVERTED = 2
_NO_FRACTION = 1.5 * 2**23  # added to it, a small float32 keeps none: it is rounded, half to even as by tf.round
_RESIZABLE = (
    *(tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64),
    *(tf.bfloat16, tf.float16, tf.float32, tf.float64),
)


class Window(NamedTuple):
    """Where a crop is cut: int32 tensors of shape (3,), for height, width and channels."""

    begin: Any
    size: Any  # -1 for the channels: all of them
    shape: Any  # of the whole image

    def widened(self) -> "Window":
        """Returns a window that starts and ends on an odd column, or at the image's own side."""
        end = tf.minimum(tf.bitwise.bitwise_or(self.begin + self.size, _COLUMNS), self.shape)
        begin = tf.maximum(tf.bitwise.bitwise_or(self.begin - _COLUMNS, _COLUMNS), 0)
        return Window(begin, end - begin, self.shape)


@dataclasses.dataclass(frozen=True, slots=True)
class RandomCrop:
    """A window of random size, shape and place, resized: the usual crop for training on photographs.

    The window is drawn as by `tf.image.stateless_sample_distorted_bounding_box` (Szegedy et al., 2014,
    arXiv:1409.4842), at most one column wider on each side; if no window fits, it is the whole image. It is resized
    bilinearly without antialiasing, the default of `tf.image.resize`, and rounded to the image's dtype.

    Args:
        size: Height and width of the result in pixels; one int if they are equal.
        area: Least and largest share of the image's area, in (0, 1]. Default: (0.08, 1), as in the paper.
        aspect_ratio: Least and largest width divided by height. Default: (3/4, 4/3), as in the paper.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.

    Example:
        >>> RandomCrop(224).size
        (224, 224)
    """

    size: int | tuple[int, int]
    area: tuple[float, float] = dataclasses.field(default=(0.08, 1.0), kw_only=True)
    aspect_ratio: tuple[float, float] = dataclasses.field(default=(3 / 4, 4 / 3), kw_only=True)
    random: ClassVar[bool] = True  # each seed gives a different window

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _as_size(self.size))
        object.__setattr__(self, "area", _as_range("area", self.area, most=1.0))
        object.__setattr__(self, "aspect_ratio", _as_range("aspect_ratio", self.aspect_ratio))

    def window(self, shape: Any, seed: Any) -> Window:
        """Returns a window, in a graph; `shape` is the image's, int32, shape (3,), and `seed` int32, shape (2,)."""
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            _WHOLE_IMAGE,
            seed,
            min_object_covered=0.0,  # its default, 0.1, would overrule an `area` from 0.08
            aspect_ratio_range=self.aspect_ratio,
            area_range=self.area,
        )
        return Window(begin, size, shape).widened()


@dataclasses.dataclass(frozen=True, slots=True)
class CentralCrop:
    """The middle of the image, resized: the usual crop for evaluating on photographs.

    The window is the largest one of the result's aspect ratio, times `fraction` in height and width. It is resized as
    by `RandomCrop`.

    Args:
        size: Height and width of the result in pixels; one int if they are equal.
        fraction: Share of the largest window's height and width, in (0, 1]. Default: 0.875, which is 224 of 256, as is
            usual for ImageNet.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a value is out of range.

    Example:
        >>> CentralCrop((192, 256)).fraction
        0.875
    """

    size: int | tuple[int, int]
    fraction: float = dataclasses.field(default=0.875, kw_only=True)
    random: ClassVar[bool] = False  # it takes no seed

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _as_size(self.size))
        _number("fraction", self.fraction, most=1.0)

    def window(self, shape: Any, seed: Any) -> Window:
        """Returns the window as `RandomCrop.window` does, without using the seed."""
        del seed
        available = shape[:2]
        target = tf.constant(side_lengths(self), tf.float64)
        scale = self.fraction * tf.reduce_min(tf.cast(available, tf.float64) / target)
        size = tf.maximum(tf.cast(tf.round(scale * target), tf.int32), 1)
        begin = tf.pad((available - size) // 2, [[0, 1]])
        return Window(begin, tf.pad(size, [[0, 1]], constant_values=-1), shape)


@without_autograph
def cut_encoded(
    crop: RandomCrop | CentralCrop, contents: Any, seed: Any, *, only_jpeg: bool = False
) -> tuple[Any, Window]:
    """Returns the crop of an encoded image, uint8 with three channels, and the window it was cut from, in a graph.

    The pixels equal those of `cut_decoded` on the decoded image, except in windows one column wide. Grey becomes three
    equal channels, transparency is dropped, and a JPEG's EXIF orientation is ignored.

    Args:
        crop: The crop.
        contents: A scalar string tensor: a JPEG, PNG, GIF (its first frame is used), BMP or WebP. Only the window of a
            JPEG is decoded.
        seed: int32, shape (2,); None for a crop that is not random.
        only_jpeg: Whether it is known to be a JPEG. Default: the graph checks, which takes 2 % of the time.
    """
    # The decoder's own error names no file, but its operation.
    with tf.name_scope("verify_images_names_the_file"):
        if only_jpeg:
            pixels, window = _of_jpeg(crop, contents, seed)
        else:
            is_jpeg = tf.equal(tf.strings.substr(contents, 0, len(_JPEG)), _JPEG)
            ways = (lambda: _of_jpeg(crop, contents, seed), lambda: _of_other(crop, contents, seed))
            pixels, window = tf.cond(is_jpeg, *ways)
    pixels.set_shape((None, None, 3))
    return resize(pixels, crop), window


@without_autograph
def cut_decoded(crop: RandomCrop | CentralCrop, image: Any, seed: Any) -> tuple[Any, Window]:
    """Returns the crop of an image, in its dtype, and the window it was cut from, in a graph.

    Args:
        crop: The crop.
        image: A tensor of shape (height, width, channels). Integers of 32 or 64 bits keep only 24 significant bits.
        seed: int32, shape (2,); None for a crop that is not random.

    Raises:
        ValueError: If `image` has another rank, or a dtype that cannot be resized.

    Example:
        >>> cut_decoded(CentralCrop(32), tf.zeros((48, 64, 1)), None)[0].shape.as_list()
        [32, 32, 1]
    """
    if image.shape.rank != 3 or image.dtype not in _RESIZABLE:
        raise ValueError(
            "Expected an image of shape (height, width, channels) and a dtype that TensorFlow can resize. Found shape "
            f"{image.shape} and dtype {image.dtype.name}. Give it three dimensions, such as with "
            "tf.ensure_shape(image, (None, None, 3)), and cast it to uint8 or float32."
        )
    window = crop.window(tf.shape(image), seed)
    resized = resize(tf.slice(image, window.begin, window.size), crop)
    resized.set_shape((*side_lengths(crop), image.shape[2]))
    return resized, window


def _of_jpeg(crop: RandomCrop | CentralCrop, contents: Any, seed: Any) -> tuple[Any, Window]:
    window = crop.window(tf.io.extract_jpeg_shape(contents), seed)
    wide = window if crop.random else window.widened()  # a random one is wide enough already
    sides = tf.gather(tf.concat([wide.begin, wide.size], 0), (0, 1, 3, 4))
    pixels = tf.io.decode_and_crop_jpeg(contents, sides, channels=3)
    return pixels if crop.random else tf.slice(pixels, window.begin - wide.begin, window.size), window


def _of_other(crop: RandomCrop | CentralCrop, contents: Any, seed: Any) -> tuple[Any, Window]:
    image = tf.io.decode_image(contents, channels=3, expand_animations=False)
    window = crop.window(tf.shape(image), seed)
    return tf.slice(image, window.begin, window.size), window


def resize(image: Any, crop: RandomCrop | CentralCrop) -> Any:
    """Returns the image, of shape (height, width, channels), bilinearly resized to the crop's size in its own dtype."""
    # What tf.image.resize calls, without its shape arithmetic, which takes 2 % of decoding and cropping a JPEG.
    height, width = side_lengths(crop)
    at_size = partial(tf.raw_ops.ResizeBilinear, size=(height, width), half_pixel_centers=True)
    whole = tf.expand_dims(image, 0)
    if image.dtype == tf.uint8 and image.shape[2] == 3:
        # It converts each pixel of the result four times, which takes longer than converting all of a small window.
        small = tf.size(image) < _CONVERTED * height * width * 3
        resized = tf.cond(small, lambda: at_size(images=tf.cast(whole, tf.float32)), lambda: at_size(images=whole))
    else:
        resized = at_size(images=whole)
    resized = tf.squeeze(resized, [0])
    if image.dtype.is_floating:
        return tf.cast(resized, image.dtype)
    if image.dtype == tf.uint8:  # the lowest byte is the number: a third of the time of tf.round and tf.cast
        return tf.cast(tf.bitcast(resized + _NO_FRACTION, tf.int32), tf.uint8)
    rounded = tf.round(resized)
    if image.dtype.size > 2:  # float32 cannot hold their maximum, and rounds it up out of range
        rounded = tf.minimum(rounded, np.nextafter(np.float32(image.dtype.max), np.float32(0)))
    return tf.cast(rounded, image.dtype)


def side_lengths(crop: RandomCrop | CentralCrop) -> tuple[int, int]:
    """Returns the height and width of a crop's result."""
    return cast("tuple[int, int]", crop.size)  # one once made


def _as_size(value: Any) -> tuple[int, int]:
    remedy = "Pass pixels, such as 224, or (height, width)."
    sides = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(sides) != 2:
        raise TypeError(f"Expected one or two integers for size. Received: {value!r}. {remedy}")
    height, width = (checks.integer("size", side, remedy, least=1) for side in sides)
    return height, width


def _as_range(name: str, value: Any, most: float | None = None) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(
            f"Expected the least and the largest value for `{name}`. Received: {value!r}. Pass two numbers."
        )
    least, largest = (_number(name, bound, most) for bound in value)
    if least > largest:
        raise ValueError(f"Expected the least value of `{name}` first. Received: {value!r}. Swap them.")
    return least, largest


def _number(name: str, value: Any, most: float | None) -> float:
    given = checks.number(name, value, "Pass one above 0, such as 0.5.", above=0)
    if most is not None and given > most:
        raise ValueError(f"Expected {name} to be at most {most:g}. Received: {value!r}. Pass a share, such as 0.5.")
    return given
