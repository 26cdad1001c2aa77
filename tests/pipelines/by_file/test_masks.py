"""Images with masks: each with its own, moved alike; and masks whose numbers TensorFlow would change."""

import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.pipelines import (
    CentralCrop,
    build_pipeline,
    images_with_masks,
    plan_pipeline,
    records,
    verify_images,
    write_records,
)

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 10), dtype=np.uint8)


@pytest.fixture
def pairs(tmp_path):
    """Six images, whose masks are their red pixels."""
    (tmp_path / "masks").mkdir()
    found = []
    for number, red in enumerate(PIXELS):
        found.append((str(tmp_path / f"{number}.png"), str(tmp_path / "masks" / f"{5 - number}.png")))
        Image.fromarray(np.stack([red, 255 - red, red // 2], -1)).save(found[-1][0])
        Image.fromarray(red).save(found[-1][1])
    return found


def read(source, **options):
    """The red pixels of each image in one epoch, checked against its mask."""
    dataset = build_pipeline(source, **{"batch_size": 4, "training": False} | options)
    reds = []
    for images, masks in dataset.as_numpy_iterator():
        np.testing.assert_array_equal(images[..., :1], masks)
        reds += list(masks[..., 0])
    return reds


def test_each_image_with_its_own_mask(pairs):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(pairs, columns=["photo", "truth"])
    forms = [
        images_with_masks(pairs),
        images_with_masks(([image for image, _ in pairs], [mask for _, mask in pairs])),
        images_with_masks(frame, column="photo", mask="truth"),
        images_with_masks({"images": frame["photo"], "masks": frame["truth"]}),
    ]
    for source in forms:
        np.testing.assert_array_equal(read(source), PIXELS)
    image, mask = build_pipeline(forms[0], batch_size=2).element_spec
    assert (image.dtype, mask.dtype, mask.shape[-1]) == (tf.uint8, tf.uint8, 1)


@pytest.mark.slow
def test_they_are_written_as_records(pairs, tmp_path):
    write_records(images_with_masks(pairs), tmp_path / "written", shuffle_seed=None)
    np.testing.assert_array_equal(read(records(tmp_path / "written")), PIXELS)


@pytest.mark.parametrize("cache", first_quick([None, "memory"]))
def test_a_crop_moves_the_mask(pairs, cache):
    crop = CentralCrop((4, 5), fraction=1.0)
    with pytest.raises(ValueError, match=r"Pass crop_with=\('1',\)"):
        plan_pipeline(images_with_masks(pairs), batch_size=2, crop=crop)
    options = {"crop": crop, "crop_with": "1", "cache": cache, "training": False}
    ((images, masks),) = build_pipeline(images_with_masks(pairs), batch_size=6, **options).as_numpy_iterator()
    np.testing.assert_array_equal(masks[..., 0], PIXELS[:, 1::2, 1::2])  # the nearest
    np.testing.assert_allclose(images[..., 0], PIXELS.reshape(6, 4, 2, 5, 2).mean((2, 4)), atol=0.51)  # the mean


@pytest.mark.slow
def test_a_changed_mask_is_read_again(pairs, tmp_path):
    options = {"cache": str(tmp_path / "cache"), "transform": lambda image, mask: (image, mask + 0)}
    for _ in range(2):
        np.testing.assert_array_equal(read(images_with_masks(pairs), **options), PIXELS)
    changed = np.where(np.arange(6)[:, None, None] == 2, PIXELS // 3 * 3, PIXELS)
    Image.fromarray(changed[2]).save(pairs[2][1])
    ((_, masks),) = build_pipeline(images_with_masks(pairs), batch_size=6, training=False, **options)
    np.testing.assert_array_equal(masks[..., 0], changed)


def spoilt(path, kind):
    """Replaces a mask by one that is bad."""
    small, whole = PIXELS[2] % 2, path.read_bytes()
    coloured = Image.fromarray(small).convert("P")
    coloured.putpalette([0, 0, 0, 200, 0, 0])
    masks = {
        "palette": coloured,
        "1 bit": Image.fromarray(small > 0),
        "16 bits": Image.fromarray(small.astype(np.uint16)),
        "RGB": Image.new("RGB", (10, 8)),
        "JPEG": Image.fromarray(small),
    }
    path.unlink()
    if kind == "cut":
        path.write_bytes(whole[:-20])
    elif kind in masks:
        masks[kind].save(path, "JPEG" if kind == "JPEG" else "PNG")
    return str(path)


@pytest.mark.parametrize("kind", first_quick(["palette", "cut", "1 bit", "16 bits", "RGB", "JPEG", "missing"], 2))
def test_a_mask_that_would_decode_to_other_numbers_is_named(pairs, tmp_path, kind):
    bad = spoilt(tmp_path / "masks" / "3.png", kind)
    assert bad == pairs[2][1]
    told = {"missing": "No such file", "cut": "is cut"}.get(kind, "not an 8-bit grey PNG. For class numbers")
    with pytest.raises(PipelineError, match=f"{re.escape(bad)}.*{told}"):
        plan_pipeline(images_with_masks(pairs), batch_size=2)
    with pytest.warns(UserWarning, match=f"1 of 6 files that do not decode, or whose masks do not(.|\n)*{bad}"):
        assert len(read(images_with_masks(pairs), on_bad_file="skip")) == 5


def test_an_image_that_is_bad_is_left_out_with_its_mask(pairs):
    Path(pairs[4][0]).write_bytes(b"no image")
    with pytest.warns(UserWarning, match=re.escape(pairs[4][0])):
        found = read(images_with_masks(pairs), on_bad_file="skip")
    np.testing.assert_array_equal(found, np.delete(PIXELS, 4, axis=0))


def test_a_mask_of_another_size_or_changed_since_is_named(pairs, tmp_path):
    dataset = build_pipeline(images_with_masks(pairs), batch_size=2, training=False, cache=None)
    spoilt(tmp_path / "masks" / "3.png", "palette")
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Not an 8-bit grey PNG.*{re.escape(pairs[2][1])}"):
        list(dataset)
    whole = Path(pairs[1][1]).read_bytes()
    for contents in (b"", whole[:-1], whole[:-12], whole[:20], b"text"):
        Path(pairs[2][1]).write_bytes(contents)
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"Not a whole.*{re.escape(pairs[2][1])}"):
            list(dataset)
    Image.fromarray(PIXELS[2].T).save(pairs[2][1])
    for options in ({}, {"crop": CentralCrop(4), "crop_with": "1"}):
        with pytest.raises(PipelineError, match=r"height and width"):
            plan_pipeline(images_with_masks(pairs), batch_size=2, **options)


def test_damage_inside_is_found(pairs, flip):
    assert str(verify_images(images_with_masks(pairs))) == "12 images: every one decodes"
    flip(Path(pairs[4][1]), 60)
    (problem,) = verify_images(images_with_masks(pairs)).problems
    assert problem.file == pairs[4][1]


@pytest.mark.parametrize(
    ("files", "options", "error", "text"),
    [
        ("photos", {}, TypeError, r"pairs in a list.*Received: str. Pass \[\(image, mask\)"),
        ([("a.png", 3)], {}, TypeError, "Received as one: 3"),
        ((["a.png"], ["b.png", "c.png"]), {}, PipelineError, "one common length"),
        ([("a.png", "b.png")], {"mask": "truth"}, TypeError, "only with a table"),
        ({"images": [], "truth": []}, {}, ValueError, "'images' and 'masks'.*with `column` and `mask`"),
    ],
)
def test_wrong_arguments_are_refused(files, options, error, text):
    with pytest.raises(error, match=text):
        images_with_masks(files, **options)
