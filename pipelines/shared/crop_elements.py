"""The crop of an example: of its image, and of what moves with it, as for a flip: masks, further images and boxes."""

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

import tensorflow as tf

from tfopt.pipelines.shared.crop import (
    CentralCrop,
    RandomCrop,
    Window,
    cut_decoded,
    cut_encoded,
    resize,
    side_lengths,
)
from tfopt.pipelines.shared.elements import without_autograph

_BOXES = "normalised boxes, (ymin, xmin, ymax, xmax) in parts of the image's height and width: Keras' 'rel_yxyx'"
_CONVERT = "Convert them in the source, such as with keras.utils.bounding_boxes.convert_format"
_OTHER_BOXES = re.compile("xyxy|xywh")
_UNMOVABLE = re.compile("mask|segment|keypoint|landmark|polygon", re.IGNORECASE)
_MOST = 1.001  # of a normalised coordinate, which may have been rounded

Kind = Literal["boxes", "pixels", "unmovable"]
Option = Literal["crop_with", "flip_with"]


# Called with the parts of an example spread, as `Dataset.map` calls its function.
@without_autograph
def crop_example(
    *parts: Any,
    crop: RandomCrop | CentralCrop,
    crop_with: Mapping[str, bool] | None = None,
    seed: Any = None,
    only_jpeg: bool = False,
) -> Any:
    """Returns the example with its image cropped: the first item of a tuple, "image" of a dict, or the example itself.

    The image is a scalar string, for `cut_encoded`, or has shape (height, width, channels), for `cut_decoded`. The
    parts that `crop_with` names are cut from the same window; `expect_movable` has seen the example's spec.
    """
    element = parts if len(parts) > 1 else parts[0]
    at, leaves = image_path(element), leaves_of(element)
    image = leaves[at]
    if image.dtype == tf.string:
        cropped, window = cut_encoded(crop, image, seed, only_jpeg=only_jpeg)
    else:
        cropped, window = cut_decoded(crop, image, seed)
    moves = {resolved(name, list(leaves), "crop_with") for name, with_image in (crop_with or {}).items() if with_image}

    def changed(path: str, leaf: Any) -> Any:
        if path == at:
            return cropped
        if path not in moves:
            return leaf
        leaf = tf.convert_to_tensor(leaf)  # `decode` may return arrays
        if kind_of(path, leaf, image) == "boxes":
            return _moved_boxes(path, leaf, window)
        return _cut(path, leaf, window, crop)

    return map_leaves(element, changed)


def expect_movable(spec: Any, moving: Mapping[str, bool], option: Option) -> None:
    """Refuses examples of this spec without an image, or with parts that would stay behind when it is changed.

    Raises:
        ValueError: If there are such parts, or `moving` names what is missing or cannot move.
    """
    change = option.removesuffix("_with")
    at, leaves = image_path(spec), leaves_of(spec)
    image = leaves.get(at)
    encoded = change == "crop" and isinstance(image, tf.TensorSpec) and image.dtype == tf.string
    if not isinstance(image, tf.TensorSpec) or image.shape.rank != (0 if encoded else 3):
        or_encoded = " or an encoded one (a scalar string)" if change == "crop" else ", decoded"
        raise ValueError(
            f"Expected an image to {change}: the first of a tuple, or 'image' of a dict, of shape (height, width, "
            f"channels){or_encoded}. Found examples {spec}. Put the image there in the source, or leave out the "
            f"{change}."
        )
    kinds = {path: kind_of(path, leaf, image) for path, leaf in leaves.items() if path != at}
    for name, moves in moving.items():
        path = resolved(name, list(leaves), option)
        if path == at:
            raise ValueError(
                f"Expected parts beside the image in `{option}`. Found {name!r}, the image itself. Leave it out."
            )
        kind = kinds.pop(path)
        if moves:
            _expect_kind(name, leaves[path], kind, option)
    behind = [path for path, kind in kinds.items() if kind is not None]
    if behind:
        found = ", ".join(f"{path!r} of shape {leaves[path].shape}, {leaves[path].dtype.name}" for path in behind)
        raise ValueError(
            f"Expected every part of an example that lies on the image to move with the image, in a {change}. Found "
            f"{found}. Pass {option}={tuple(behind)} to move it, or {option}={dict.fromkeys(behind, False)} if it "
            "does not lie on the image."
        )


def _expect_kind(name: str, leaf: Any, kind: Kind | None, option: Option) -> None:
    if kind == "boxes" and (not leaf.dtype.is_floating or _OTHER_BOXES.search(name)):
        raise ValueError(f"Expected {_BOXES}. Found {name!r} of dtype {leaf.dtype.name}. {_CONVERT}.")
    if kind not in ("boxes", "pixels"):
        raise ValueError(
            f"Expected in `{option}` boxes of shape (..., 4), or masks and images of shape (height, width) or (height, "
            f"width, channels) as the image has. Found {name!r} {leaf}, which cannot move. Decode or convert it in the "
            "source, or crop in a function of your own as `augment`."
        )


def kind_of(path: str, leaf: Any, image: Any) -> Kind | None:
    """What a part beside the image seems to be; None for what does not lie on it, such as a label."""
    key = path.rpartition("/")[2].lower()
    shape = getattr(leaf, "shape", None)
    if shape is None or shape.rank is None or isinstance(leaf, tf.RaggedTensorSpec | tf.SparseTensorSpec):
        return "unmovable" if "box" in key or _UNMOVABLE.search(key) else None
    if leaf.dtype == tf.string:
        return "unmovable" if _UNMOVABLE.search(key) else None
    sides = image.shape[:2] if image.dtype != tf.string else tf.TensorShape((None, None))
    on_image = shape.rank in (2, 3) and shape[:2].is_compatible_with(sides)
    in_fours = shape.rank > 0 and shape[-1] == 4
    if in_fours and ("box" in key or (shape.rank == 1 and leaf.dtype.is_floating)):
        return "boxes"
    if in_fours and shape.rank == 2 and not (on_image and sides.is_fully_defined()):
        return "boxes"
    if on_image:
        return "pixels"
    # Boxes with a class or a score behind their four numbers, too.
    return "unmovable" if shape.rank > 1 and ("box" in key or _UNMOVABLE.search(key)) else None


def _cut(path: str, pixels: Any, window: Window, crop: RandomCrop | CentralCrop) -> Any:
    """Cuts a mask or image as large as the image; only what is called an image is interpolated."""
    sides, expected = tf.shape(pixels)[:2], window.shape[:2]
    text = f"Expected {path!r} of the image's height and width, {{}}. Found {{}}. Resize it in the source."
    same = tf.debugging.Assert(tf.reduce_all(sides == expected), [tf.strings.format(text, (expected, sides))])
    with tf.control_dependencies([same]):
        pixels = tf.identity(pixels)
    height, width = side_lengths(crop)
    if "image" in path.rpartition("/")[2].lower() and pixels.shape.rank == 3:
        cut = resize(tf.slice(pixels, window.begin, window.size), crop)
    else:
        rows, columns = (
            window.begin[axis] + (2 * tf.range(side) + 1) * window.size[axis] // (2 * side)
            for axis, side in enumerate((height, width))
        )
        cut = tf.gather(tf.gather(pixels, rows), columns, axis=1)
    cut.set_shape((height, width, *pixels.shape[2:]))
    return cut


def _moved_boxes(path: str, boxes: Any, window: Window) -> Any:
    """Shifts and scales boxes to the window, and clips them; one that lies outside gets no area."""
    corners = tf.cast(expect_normalised(path, boxes), tf.float32)
    begin, size, shape = (tf.cast(tf.tile(part[:2], (2,)), tf.float32) for part in window)
    return tf.cast(tf.clip_by_value((corners * shape - begin) / size, 0.0, 1.0), boxes.dtype)


def expect_normalised(path: str, boxes: Any) -> Any:
    """Returns boxes, in a graph; fails if they are in pixels."""
    text = f"Expected in {path!r} {_BOXES}. Found {{}}. {_CONVERT}."
    most = tf.reduce_max(boxes)
    with tf.control_dependencies([tf.debugging.Assert(most <= _MOST, [tf.strings.format(text, most)])]):
        return tf.identity(boxes)


def image_path(element: Any) -> str:
    """Returns the path of an example's image."""
    is_tuple = isinstance(element, tuple)
    first = element[0] if is_tuple else element
    return "/".join(["0"] * is_tuple + ["image"] * isinstance(first, dict))


def resolved(name: str, paths: list[str], option: Option) -> str:
    """Returns the one path that a name stands for: the path itself, or its last parts."""
    found = [path for path in paths if path == name] or [path for path in paths if path.endswith(f"/{name}")]
    if len(found) == 1:
        return found[0]
    near = difflib.get_close_matches(name, [*paths, *(path.rpartition("/")[2] for path in paths)], n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(
        f"Expected one part of the example for {name!r} of `{option}`. Found {len(found)} of that name among "
        f"{', '.join(map(repr, paths))}. Pass one of these.{hint}"
    )


def leaves_of(element: Any) -> dict[str, Any]:
    """Returns the leaves of nested tuples and dicts by their paths."""
    leaves: dict[str, Any] = {}
    map_leaves(element, leaves.__setitem__)
    return leaves


def map_leaves(element: Any, function: Callable[[str, Any], Any], path: str = "") -> Any:
    """Calls a function of the path and the leaf for each leaf of nested tuples and dicts, such as "1/boxes"."""
    if isinstance(element, dict):
        return {key: map_leaves(part, function, f"{path}/{key}") for key, part in element.items()}
    if isinstance(element, tuple):
        parts = [map_leaves(part, function, f"{path}/{index}") for index, part in enumerate(element)]
        return tuple(parts) if type(element) is tuple else type(element)(*parts)
    return function(path[1:], element)
