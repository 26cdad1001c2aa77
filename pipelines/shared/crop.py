"""Crops of images, random for training and central for evaluation; only the crop of a JPEG is decoded."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np
import tensorflow as tf

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
    """Where a crop was cut: int32 tensors of shape (3,), for height, width and channels."""

    begin: Any
    size: Any  # -1 for the channels: all of them
    shape: Any  # of the whole image


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
        object.__setattr__(self, "aspect_ratio", _as_range("aspect_ratio", self.aspect_ratio, most=math.inf))

    def window(self, shape: Any, seed: Any) -> tuple[Any, Any]:
        """Returns the window's start, `(row, column, 0)`, and size, `(height, width, -1)`, in a graph.

        `shape` is the image's, int32, shape (3,), and `seed` int32, shape (2,).
        """
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            shape,
            _WHOLE_IMAGE,
            seed,
            min_object_covered=0.0,  # its default, 0.1, would overrule an `area` from 0.08
            aspect_ratio_range=self.aspect_ratio,
            area_range=self.area,
        )
        return _widened(begin, size, shape)


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
        _expect_share("fraction", self.fraction, most=1.0)

    def window(self, shape: Any, seed: Any) -> tuple[Any, Any]:
        """Returns the window as `RandomCrop.window` does, without using the seed."""
        del seed
        available = shape[:2]
        target = tf.constant(side_lengths(self), tf.float64)
        scale = self.fraction * tf.reduce_min(tf.cast(available, tf.float64) / target)
        size = tf.maximum(tf.cast(tf.round(scale * target), tf.int32), 1)
        return tf.pad((available - size) // 2, [[0, 1]]), tf.pad(size, [[0, 1]], constant_values=-1)


@without_autograph
def crop_encoded(crop: RandomCrop | CentralCrop, contents: Any, seed: Any, *, only_jpeg: bool = False) -> Any:
    """Returns the crop of an encoded image, in a graph.

    The pixels equal those of `crop_decoded` on the decoded image, except in windows one column wide.

    Args:
        crop: The crop.
        contents: A scalar string tensor: a JPEG, PNG, GIF (its first frame is used), BMP or WebP. Only the window of a
            JPEG is decoded.
        seed: int32, shape (2,); None for a crop that is not random.
        only_jpeg: Whether it is known to be a JPEG. Default: the graph checks, which takes 2 % of the time.

    Returns:
        uint8, shape (height, width, 3). Grey becomes three equal channels, transparency is dropped, and a JPEG's EXIF
        orientation is ignored.

    Example:
        >>> picture = tf.io.encode_jpeg(tf.zeros((48, 64, 3), tf.uint8))
        >>> crop_encoded(RandomCrop(32), picture, (1, 2)).shape.as_list()
        [32, 32, 3]
    """
    return cut_encoded(crop, contents, seed, only_jpeg=only_jpeg)[0]


@without_autograph
def cut_encoded(crop: RandomCrop | CentralCrop, contents: Any, seed: Any, *, only_jpeg: bool) -> tuple[Any, Window]:
    """Returns what `crop_encoded` does, and the window it was cut from."""
    # The decoder's own error names no file, but its operation.
    with tf.name_scope("verify_images_names_the_file"):
        if only_jpeg:
            pixels, *window = _of_jpeg(crop, contents, seed)
        else:
            is_jpeg = tf.equal(tf.strings.substr(contents, 0, len(_JPEG)), _JPEG)
            ways = (lambda: _of_jpeg(crop, contents, seed), lambda: _of_other(crop, contents, seed))
            pixels, *window = tf.cond(is_jpeg, *ways)
    pixels.set_shape((None, None, 3))
    return resize(pixels, crop), Window(*window)


@without_autograph
def crop_decoded(crop: RandomCrop | CentralCrop, image: Any, seed: Any) -> Any:
    """Returns the crop of an image, in a graph.

    Args:
        crop: The crop.
        image: A tensor of shape (height, width, channels). Integers of 32 or 64 bits keep only 24 significant bits.
        seed: int32, shape (2,); None for a crop that is not random.

    Returns:
        The crop in the image's dtype, shape (height, width, channels).

    Raises:
        ValueError: If `image` has another rank, or a dtype that cannot be resized.

    Example:
        >>> crop_decoded(CentralCrop(32), tf.zeros((48, 64, 1)), None).shape.as_list()
        [32, 32, 1]
    """
    return cut_decoded(crop, image, seed)[0]


@without_autograph
def cut_decoded(crop: RandomCrop | CentralCrop, image: Any, seed: Any) -> tuple[Any, Window]:
    """Returns what `crop_decoded` does, and the window it was cut from."""
    if image.shape.rank != 3 or image.dtype not in _RESIZABLE:
        raise ValueError(
            "Expected an image of shape (height, width, channels) and a dtype that TensorFlow can resize. Found shape "
            f"{image.shape} and dtype {image.dtype.name}. Give it three dimensions, such as with "
            "tf.ensure_shape(image, (None, None, 3)), and cast it to uint8 or float32."
        )
    window = Window(*crop.window(tf.shape(image), seed), tf.shape(image))
    resized = resize(tf.slice(image, window.begin, window.size), crop)
    resized.set_shape((*side_lengths(crop), image.shape[2]))
    return resized, window


def _of_jpeg(crop: RandomCrop | CentralCrop, contents: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    shape = tf.io.extract_jpeg_shape(contents)
    begin, size = crop.window(shape, seed)
    if crop.random:  # its windows are wide enough already
        return _decode_window(contents, begin, size), begin, size, shape
    first, wide = _widened(begin, size, shape)
    return tf.slice(_decode_window(contents, first, wide), begin - first, size), begin, size, shape


def _decode_window(contents: Any, begin: Any, size: Any) -> Any:
    window = tf.gather(tf.concat([begin, size], 0), (0, 1, 3, 4))
    return tf.io.decode_and_crop_jpeg(contents, window, channels=3)


def _of_other(crop: RandomCrop | CentralCrop, contents: Any, seed: Any) -> tuple[Any, Any, Any, Any]:
    image = tf.io.decode_image(contents, channels=3, expand_animations=False)
    begin, size = crop.window(tf.shape(image), seed)
    return tf.slice(image, begin, size), begin, size, tf.shape(image)


def _widened(begin: Any, size: Any, shape: Any) -> tuple[Any, Any]:
    """Returns a window that starts and ends on an odd column, or at the image's own side."""
    end = tf.minimum(tf.bitwise.bitwise_or(begin + size, _COLUMNS), shape)
    begin = tf.maximum(tf.bitwise.bitwise_or(begin - _COLUMNS, _COLUMNS), 0)
    return begin, end - begin


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
    sides = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    whole = [isinstance(side, numbers.Integral) and not isinstance(side, bool) for side in sides]
    if len(sides) != 2 or not all(whole):
        raise TypeError(
            f"Expected an int, or (height, width), for `size`. Received: {value!r}. Pass pixels, such as 224."
        )
    if min(sides) < 1:
        raise ValueError(f"Expected at least 1 pixel for `size`. Received: {value!r}. Pass pixels, such as 224.")
    return int(sides[0]), int(sides[1])


def _as_range(name: str, value: Any, most: float) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise TypeError(
            f"Expected the least and the largest value for `{name}`. Received: {value!r}. Pass two numbers."
        )
    for bound in value:
        _expect_share(name, bound, most)
    if value[0] > value[1]:
        raise ValueError(f"Expected the least value of `{name}` first. Received: {value!r}. Swap them.")
    return float(value[0]), float(value[1])


def _expect_share(name: str, value: Any, most: float) -> None:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"Expected a number for `{name}`. Received: {value!r}. Pass one above 0, such as 0.5.")
    if not 0 < float(value) <= most or not math.isfinite(value):
        limits = "above 0" if math.isinf(most) else f"above 0 and at most {most:g}"
        raise ValueError(f"Expected `{name}` to be {limits}. Received: {value!r}. Pass a number such as 0.5.")
