"""`RandomFlip`: mirrors images, and the masks, further images and boxes on them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfopt.pipelines.shared.crop_elements import (
    expect_movable,
    expect_normalised,
    image_path,
    kind_of,
    leaves_of,
    map_leaves,
    resolved,
)
from tfopt.pipelines.shared.elements import without_autograph
from tfopt.pipelines.shared.options import expect_name, parts_that_move

_AXES = {"vertical": 0, "horizontal": 1}  # of (height, width, channels)


@dataclasses.dataclass(frozen=True, slots=True)
class RandomFlip:
    """Mirrors half of the images at random, with their masks and boxes: pass it as `augment` to train.

    The image is the first item of a tuple, or "image" of a dict, decoded, of shape (height, width, channels). Boxes, of
    shape (..., 4) and any number, are normalised: (ymin, xmin, ymax, xmax) as fractions of the image; those with zero
    area, such as padding, stay as they are.

    Args:
        flip_with: Masks, further images and boxes that are flipped with the image, named as for `crop_with`. A part
            that looks like one of these and is not named is refused; a dict with False for it leaves it as it is.
        axis: "horizontal" changes left and right, "vertical" top and bottom. Pass a list of both flips for both.
            Default: "horizontal".

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If `axis` is neither.
        PipelineError: When a pipeline is planned, if a part would stay behind, or there is no image.

    Example:
        >>> import numpy as np
        >>> from tfopt.pipelines import build_pipeline
        >>> images, masks = np.zeros((8, 32, 32, 3)), np.zeros((8, 32, 32))
        >>> dataset = build_pipeline((images, masks), batch_size=4, augment=RandomFlip("1"))
    """

    flip_with: str | int | Sequence[str | int] | Mapping[str | int, bool] = ()
    axis: Literal["horizontal", "vertical"] = dataclasses.field(default="horizontal", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "flip_with", parts_that_move("flip_with", self.flip_with))
        expect_name("axis", self.axis, tuple(_AXES))

    @without_autograph
    def __call__(self, *parts: Any, seed: Any) -> Any:
        """Returns the example, flipped or not; `seed` is int32, shape (2,)."""
        example = parts if len(parts) > 1 else parts[0]
        moving: Mapping[str, bool] = self.flip_with  # type: ignore[assignment]  # a dict once made
        expect_movable(tf.nest.map_structure(tf.type_spec_from_value, example), moving, "flip_with")
        leaves, at = leaves_of(example), image_path(example)
        moves = sorted({at} | {resolved(name, list(leaves), "flip_with") for name, moved in moving.items() if moved})

        def flipped() -> list[Any]:
            return [_mirrored(path, leaves[path], leaves[at], _AXES[self.axis]) for path in moves]

        draw = tf.random.stateless_uniform((), seed) < 0.5
        found = tf.cond(draw, flipped, lambda: [tf.identity(leaves[path]) for path in moves])
        changed = leaves | dict(zip(moves, found, strict=True))
        return map_leaves(example, lambda path, leaf: changed[path])


def _mirrored(path: str, leaf: Any, image: Any, axis: int) -> Any:
    """Returns an image, a mask or boxes, flipped along an axis of the image."""
    if leaf is image or kind_of(path, leaf, image) == "pixels":
        return tf.reverse(leaf, [axis])
    corners = list(tf.unstack(expect_normalised(path, leaf), axis=-1))
    low, high = corners[axis], corners[axis + 2]
    has_area = (corners[0] < corners[2]) & (corners[1] < corners[3])
    corners[axis], corners[axis + 2] = tf.where(has_area, 1 - high, low), tf.where(has_area, 1 - low, high)
    return tf.stack(corners, axis=-1)
