"""Formats of image files: what they decode to, which are refused, and what of their contents is dropped."""

import os
import re
import struct

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from unwrapped import unwrapped
from versions import since_tensorflow

from tfopt.errors import PipelineError
from tfopt.pipelines import CentralCrop, build_pipeline, images, images_with_masks, plan_pipeline


def decoded(folder, **options):
    """The one image of a folder."""
    ((image, _),) = build_pipeline(folder, batch_size=1, training=False, **options)
    return image[0].numpy()


def frames_of(form, *shades, **options):
    """An animation of one colour a frame, as `one` takes it."""
    frames = [Image.new("RGB", (8, 8), (shade, 9, 9)) for shade in shades]
    return frames[0], form, {"save_all": True, "append_images": frames[1:], **options}


@pytest.fixture
def one(tmp_path):
    """Writes the one image of a class, given as an image with options or as bytes; returns the folder of classes."""

    def write(image, form, options=()):
        path = tmp_path / "one" / "a" / "x"
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(image, bytes):
            path.write_bytes(image)
        else:
            image.save(path, form, **dict(options))
        return tmp_path / "one"

    return write


@pytest.mark.parametrize(
    ("name", "mode"),
    [("a.png", m) for m in ("RGB", "L", "RGBA", "P", "LA", "1")]
    + [("a.bmp", m) for m in ("RGB", "L", "RGBA")]
    + [("a.gif", m) for m in ("RGB", "L", "P")]
    + [("a.jpg", m) for m in ("RGB", "L", "CMYK")],
)
def test_formats_decode_to_three_channels(tmp_path, picture, name, mode):
    path = picture(tmp_path / "one" / name, shade=120, mode=mode)
    image = decoded(tmp_path)
    with Image.open(path) as reference:
        expected = np.asarray(reference.convert("RGB")).astype(int)
    assert image.shape == (6, 5, 3)
    # The two JPEG decoders round differently.
    np.testing.assert_allclose(image.astype(int), expected, atol=3 if name == "a.jpg" else 0)


@since_tensorflow("2.20")
@pytest.mark.parametrize("options", [{}, {"crop": CentralCrop(16, fraction=1.0)}])
def test_webp_decodes_to_its_pixels(one, options):
    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    folder = one(Image.fromarray(pixels), "WebP", {"lossless": True})
    np.testing.assert_array_equal(decoded(folder, **options), pixels)


def test_webp_is_refused_where_tensorflow_cannot_decode_it(one, monkeypatch):
    monkeypatch.delattr("tensorflow.raw_ops.DecodeWebP", raising=False)
    with pytest.raises(PipelineError, match=r"a WebP, which TensorFlow decodes from 2\.20 on\. Convert it to PNG"):
        decoded(one(Image.new("RGB", (8, 8)), "WebP"))


def test_an_animation_gives_its_first_frame(one):
    assert decoded(one(*frames_of("GIF", 250, 10))).tolist() == [[[250, 9, 9]] * 8] * 8


def bmp(masks, pixel):
    """Returns a BMP of one pixel of 32 bits, with these masks of red, green and blue."""
    header = struct.pack("<IiiHHIIiiII3I", 40, 1, 1, 1, 32, 3, 4, 0, 0, 0, 0, *masks)
    return struct.pack("<2sIHHI", b"BM", 70, 0, 0, 66) + header + pixel


def test_a_bmp_with_the_usual_masks_decodes_to_its_colours(one):
    assert decoded(one(bmp((0xFF0000, 0xFF00, 0xFF), bytes([3, 2, 1, 0])), "BMP")).tolist() == [[[1, 2, 3]]]


CLEAR = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(8, 8, 4))  # TensorFlow decodes it to four channels only
REFUSED = {
    "animated WebP": (frames_of("WebP", 0, 90), "an animated WebP. Convert it to GIF"),
    "WebP with transparency": ((CLEAR, "WebP"), "a WebP with transparency. Convert it to PNG"),
    "lossless WebP with transparency": ((CLEAR, "WebP", {"lossless": True}), "a WebP with transparency"),
    "cut WebP": ((b"RIFF\x09\0\0\0WEBPVP8X", "WebP"), "a WebP that"),
    "BMP with a palette": ((Image.new("P", (8, 8), 3), "BMP"), "a BMP with a palette.*Convert it to PNG"),
    "BMP in another order": ((bmp((0xFF, 0xFF00, 0xFF0000), bytes(4)), "BMP"), "a BMP with a.* unusual masks"),
    "BMP of 16 bits": ((bmp((0xF800, 0x7E0, 0x1F), bytes(4)), "BMP"), "a BMP with a.* unusual masks"),
}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=since_tensorflow("2.20")) if kind == "cut WebP" else kind for kind in REFUSED]
)
def test_what_decodes_wrongly_or_not_is_refused_by_name(one, kind):
    image, expected = REFUSED[kind]
    with pytest.raises(PipelineError, match=f"a/x: {expected}"):
        plan_pipeline(one(*image), batch_size=1)


@pytest.mark.timeout(20)
def test_a_pipe_is_named_and_not_waited_for(tmp_path, picture):
    image, pipe = picture(tmp_path / "x.png"), str(tmp_path / "pipe.png")
    os.mkfifo(pipe)
    for source in (images([(pipe, 1)]), images_with_masks([(image, pipe)]), images_with_masks([(pipe, image)])):
        with pytest.raises(PipelineError, match=f"{re.escape(pipe)}: a folder, a pipe or a device"):
            plan_pipeline(source, batch_size=1)


def turned(order, orientation):
    exif = Image.Exif()
    exif.endian = order
    exif[0x010F], exif[0x0112] = "a maker of telephones", orientation
    return Image.new("RGB", (12, 8)), "JPEG", {"exif": exif}


def png(mode, **options):
    return Image.new(mode, (8, 8)), "PNG", options


DEEP = tf.io.encode_png(np.arange(192, dtype=np.uint16).reshape(8, 8, 3) * np.uint16(257)).numpy()
LOST = {
    "on its side, little-endian": (turned("<", 6), "are to be shown turned, by EXIF"),
    "on its side, big-endian": (turned(">", 6), "are to be shown turned, by EXIF"),
    "upright, little-endian": (turned("<", 1), ""),
    "upright, big-endian": (turned(">", 1), ""),
    "16 bits": ((DEEP, "PNG"), "have 16 bits, of which the upper 8 are kept"),
    "RGBA": (png("RGBA"), "have transparency, which is dropped"),
    "grey with alpha": (png("LA"), "have transparency"),
    "a transparent colour of a palette": (png("P", transparency=0), "have transparency"),
    "RGB": (png("RGB"), ""),
    "palette": (png("P"), ""),
    "PNG of two frames": (png("RGB", save_all=True, append_images=[Image.new("RGB", (8, 8), 9)]), "have several"),
    "GIF of three frames": (frames_of("GIF", 0, 90, 180), "have several frames, of which the first is used"),
    "GIF of three frames that shows once": (frames_of("GIF", 0, 90, 180, comment=b"x" * 9000), "have several frames"),
    "GIF of three frames in a loop": (frames_of("GIF", 0, 90, 180, loop=0), "have several frames"),
    "GIF with a transparent colour": (frames_of("GIF", 0, transparency=0), "have transparency"),
    "GIF": (frames_of("GIF", 0), ""),
}


@pytest.mark.parametrize("kind", LOST)
def test_the_plan_says_what_is_dropped_of_an_image(one, kind):
    image, expected = LOST[kind]
    folder = one(*image)
    Image.new("RGB", (12, 8)).save(folder / "a" / "y", "PNG")
    reason = unwrapped(plan_pipeline(folder, batch_size=1, crop=CentralCrop(8)).stage("read").reason)
    assert (f"1 of 2 files {expected}" if expected else "") in reason
    assert ("of 2 files" in reason) is bool(expected)


def test_what_the_plan_says_is_so(one):
    assert decoded(one(*turned("<", 6))).shape == (8, 12, 3)
    assert decoded(one(DEEP, "PNG")).ravel().tolist() == list(range(192))


def test_a_gif_that_is_cut_is_a_bad_file_or_shows_its_first_frame(one):
    folder = one(*frames_of("GIF", 0, 90))
    whole = (folder / "a" / "x").read_bytes()
    for length in range(0, 48, 3):
        one(whole[:length], "GIF")
        with pytest.raises(PipelineError, match="Expected images that TensorFlow decodes"):
            plan_pipeline(folder, batch_size=1, training=False)
    one(whole[: whole.rindex(b",")], "GIF")
    assert decoded(folder).tolist() == [[[0, 9, 9]] * 8] * 8
    assert "frames" not in unwrapped(plan_pipeline(folder, batch_size=1))
