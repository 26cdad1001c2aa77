"""Crops the image of an example, encoded or not."""

from typing import Any

import tensorflow as tf

from tfopt.pipelines.shared.crop import CentralCrop, RandomCrop, crop_decoded, crop_encoded
from tfopt.pipelines.shared.elements import without_autograph


# Called with the parts of an example spread, as `Dataset.map` calls its function.
@without_autograph
def crop_example(*parts: Any, crop: RandomCrop | CentralCrop, seed: Any = None, only_jpeg: bool = False) -> Any:
    """Returns the example with its image cropped: the first of a tuple, "image" of a dict, or the example itself.

    Args:
        crop: The crop.
        seed: An int32 tensor of shape (2,), for a random one.
        only_jpeg: Whether encoded images are known to be JPEGs.
        *parts: The example. An image is a scalar string tensor (encoded) or of shape (height, width, channels).
    """
    first, rest = parts[0], parts[1:]
    image = first["image"] if isinstance(first, dict) else first
    encoded = image.dtype == tf.string
    cropped = crop_encoded(crop, image, seed, only_jpeg=only_jpeg) if encoded else crop_decoded(crop, image, seed)
    changed = {**first, "image": cropped} if isinstance(first, dict) else cropped
    return (changed, *rest) if rest else changed


def expect_image(spec: Any) -> None:
    """Raises a ValueError unless examples of this element spec hold an image where `crop_example` looks for it."""
    first = spec[0] if isinstance(spec, tuple) else spec
    image = first.get("image") if isinstance(first, dict) else first
    if isinstance(image, tf.TensorSpec) and image.shape.rank == (0 if image.dtype == tf.string else 3):
        return
    raise ValueError(
        "Expected an image to crop: the first of a tuple, or 'image' of a dict, of shape (height, width, channels) or "
        f"an encoded one (a scalar string). Found examples {spec}. Put the image there in the source, or leave out "
        "`crop`."
    )
