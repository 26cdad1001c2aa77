"""Images given by their paths and labels, as tables, in flat folders; and what their files say that is not honoured."""

import os
import re

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import CentralCrop, build_pipeline, images, images_with_masks, plan_pipeline


def shades(dataset):
    return [int(image[1, 1, 0]) for batch, _ in dataset for image in batch]


def labels(dataset):
    return [label for _, batch in dataset for label in batch.numpy().tolist()]


@pytest.fixture
def files(tmp_path, picture):
    """Six images, shades 0 to 50 in steps of ten."""
    return [picture(tmp_path / "flat" / f"{index}.png", shade=10 * index) for index in range(6)]


def ordered(source):
    return build_pipeline(source, batch_size=2, training=False)


class Table:
    """As much of a pandas DataFrame as is needed; pandas itself is not imported."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return np.asarray(self._columns[name])


@pytest.mark.parametrize("form", ["lists", "arrays", "dict", "table", "frame"])
def test_paths_and_labels(files, form):
    given = [3, 1, 4, 1, 5, 9]
    columns = {"paths": files, "labels": given}
    if form == "frame":
        columns = pytest.importorskip("pandas").DataFrame(columns | {"other": 0}, index=range(6, 0, -1))
    data = {
        "lists": (files, given),
        "arrays": (np.array(files), np.array(given)),
        "dict": columns,
        "table": Table(columns),
        "frame": columns,
    }[form]
    dataset = ordered(images(data))
    assert shades(dataset) == [0, 10, 20, 30, 40, 50]
    assert labels(dataset) == given


def test_labels_keep_their_type_and_shape(files):
    boxes = np.random.default_rng(0).random((6, 4)).astype(np.float32)
    _, spec = ordered(images((files, boxes))).element_spec
    assert (spec.dtype, spec.shape.as_list()) == (tf.float32, [2, 4])
    np.testing.assert_array_equal(np.concatenate([batch for _, batch in ordered(images((files, boxes)))]), boxes)


@pytest.mark.parametrize("classes", [None, ["dog", "cat", "cow"]])
def test_names_become_the_numbers_of_classes(files, classes):
    source = images((files, ["dog", "cat", "cat", "dog", "cat", "dog"]), classes=classes)
    assert source.class_names == tuple(classes or ("cat", "dog"))
    assert labels(ordered(source)) == ([0, 1, 1, 0, 1, 0] if classes else [1, 0, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda f: (f, [1, 2]), PipelineError, "one common length"),
        (lambda f: ([], []), PipelineError, "at least one example"),
        (lambda f: (f, ["a", None] * 3), TypeError, "NoneType"),
        (lambda f: (f, 3), TypeError, "labels"),
        (lambda f: ([3] * 6, [1] * 6), TypeError, "paths"),
        (lambda f: (f[0], [1]), TypeError, "paths"),
        (lambda f: {"path": f, "label": [1] * 6}, ValueError, r"columns 'paths' and 'labels'.*'path', 'label'"),
        (lambda f: (f, [1] * 6, [2] * 6), TypeError, "paths, labels"),
    ],
)
def test_wrong_paths_and_labels_are_refused(files, change, error, text):
    with pytest.raises(error, match=f"{text}.*(Pass|Check|Name|Rename)"):
        images(change(files))


def test_labels_outside_the_classes_are_refused(files):
    with pytest.raises(PipelineError, match="'cow'"):
        images((files, ["cat", "cow"] * 3), classes=["cat", "dog"])
    with pytest.raises(PipelineError, match="2"):
        images((files, [0, 1, 2] * 2), classes=["cat", "dog"])


def test_a_path_without_a_file_is_named(files, tmp_path):
    gone = str(tmp_path / "gone.png")
    with pytest.raises(PipelineError, match=rf"{re.escape(gone)}.*No such file"):
        plan_pipeline(images(([*files, gone], range(7))), batch_size=2)
    with pytest.warns(UserWarning, match=f"1 of 7 files(.|\n)*{re.escape(gone)}"):
        dataset = build_pipeline(images(([*files, gone], range(7))), batch_size=2, training=False, on_bad_file="skip")
    assert labels(dataset) == list(range(6))


def test_a_flat_folder_gives_names(files, tmp_path):
    (tmp_path / "flat" / "LICENSE.txt").write_text("text")
    dataset = ordered(tmp_path / "flat")
    assert shades(dataset) == [0, 10, 20, 30, 40, 50]
    assert labels(dataset) == [f"{index}.png".encode() for index in range(6)]
    assert images(tmp_path / "flat").class_names is None
    with pytest.raises(PipelineError, match="one subfolder per class"):
        images(tmp_path / "flat", classes=["a"])


@pytest.mark.parametrize("crop", [False, True])
def test_webp_decodes_to_its_pixels(tmp_path, picture, crop):
    path = tmp_path / "a" / "x.webp"
    picture(path, shade=120, size=(16, 16))
    Image.open(path).save(path, lossless=True)
    options = {"crop": CentralCrop(16, fraction=1.0)} if crop else {}
    ((image, _),) = build_pipeline(tmp_path, batch_size=1, training=False, **options)
    with Image.open(path) as reference:
        np.testing.assert_array_equal(image[0], np.asarray(reference.convert("RGB")))


def test_an_animated_webp_is_refused_by_name(tmp_path):
    (tmp_path / "a").mkdir()
    frames = [Image.new("RGB", (8, 8), (shade, 0, 0)) for shade in (250, 10)]
    frames[0].save(tmp_path / "a" / "x.webp", save_all=True, append_images=frames[1:])
    with pytest.raises(PipelineError, match=r"x\.webp.*animated WebP"):
        plan_pipeline(tmp_path, batch_size=1)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_webp_with_transparency_is_refused_by_name(tmp_path, lossless):
    """TensorFlow decodes it to four channels only."""
    pixels = np.arange(256, dtype=np.uint8).reshape(8, 8, 4)
    Image.fromarray(pixels).save(tmp_path / "x.webp", lossless=lossless)
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.io.decode_image((tmp_path / "x.webp").read_bytes(), channels=3)
    with pytest.raises(PipelineError, match=r"x\.webp.*WebP with transparency. Convert"):
        plan_pipeline(images([(tmp_path / "x.webp", 1)]), batch_size=1)


@pytest.mark.timeout(20)
def test_a_pipe_is_named_and_not_waited_for(tmp_path, picture):
    image, pipe = picture(tmp_path / "x.png"), str(tmp_path / "pipe.png")
    os.mkfifo(pipe)
    for source in (images([(pipe, 1)]), images_with_masks([(image, pipe)]), images_with_masks([(pipe, image)])):
        with pytest.raises(PipelineError, match=f"{re.escape(pipe)}: a folder, a pipe or a device"):
            plan_pipeline(source, batch_size=1)


@pytest.mark.parametrize("order", ["big", "little"])
@pytest.mark.parametrize("orientation", [1, 6])
def test_the_plan_says_that_photographs_lie_on_their_side(tmp_path, order, orientation):
    (tmp_path / "a").mkdir()
    exif = Image.Exif()
    exif.endian = "<" if order == "little" else ">"
    exif[0x010F], exif[0x0112] = "a maker of telephones", orientation
    picture = Image.fromarray(np.zeros((8, 12, 3), np.uint8))
    picture.save(tmp_path / "a" / "x.jpg", exif=exif)
    picture.save(tmp_path / "a" / "y.jpg")
    plan = plan_pipeline(tmp_path, batch_size=1, crop=None)
    # What the reason says is so: the rows are those stored.
    assert next(iter(plan.build()))[0].shape == (1, 8, 12, 3)
    assert ("1 of 2 files" in plan.stage("read").reason) is (orientation == 6)
    assert ("EXIF" in unwrapped(plan)) is (orientation == 6)


@pytest.mark.parametrize("bits", [8, 16])
def test_the_plan_says_that_16_bits_become_8(tmp_path, bits):
    (tmp_path / "a").mkdir()
    dtype = {8: np.uint8, 16: np.uint16}[bits]
    pixels = np.arange(8 * 8 * 3, dtype=dtype).reshape(8, 8, 3) * dtype(1 if bits == 8 else 257)
    (tmp_path / "a" / "x.png").write_bytes(tf.io.encode_png(pixels).numpy())
    plan = plan_pipeline(tmp_path, batch_size=1, training=False)
    assert ("16 bits" in unwrapped(plan)) is (bits == 16)
    ((image, _),) = plan.build()
    np.testing.assert_array_equal(image[0], pixels if bits == 8 else pixels >> 8)


def gif_of(number, **options):
    images = [Image.new("RGB", (8, 8), (99 * shade, 9, 9)) for shade in range(number)]
    return {"format": "GIF", "save_all": True, "append_images": images[1:], **options}, images[0]


def png_of(mode, **options):
    return {"format": "PNG", **options}, Image.new(mode, (8, 8))


LOST = {
    "RGBA": (png_of("RGBA"), "1 of 2 files have transparency, which is dropped"),
    "grey with alpha": (png_of("LA"), "transparency"),
    "a transparent colour of a palette": (png_of("P", transparency=0), "transparency"),
    "RGB": (png_of("RGB"), ""),
    "palette": (png_of("P"), ""),
    "GIF of three frames": (gif_of(3), "1 of 2 files have several frames, of which the first is used"),
    "GIF of three frames that shows once": (gif_of(3, comment=b"x" * 9000), "several frames"),
    "GIF of three frames in a loop": (gif_of(3, loop=0), "several frames"),
    "GIF with a transparent colour": (gif_of(1, transparency=0), "transparency"),
    "GIF": (gif_of(1), ""),
    "PNG of two frames": (png_of("RGB", save_all=True, append_images=[Image.new("RGB", (8, 8), 9)]), "frames"),
}


@pytest.mark.parametrize("kind", LOST)
def test_the_plan_says_what_is_dropped_of_an_image(tmp_path, kind):
    (options, image), expected = LOST[kind]
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x", **options)
    Image.new("RGB", (8, 8)).save(tmp_path / "a" / "y", "PNG")
    plan = plan_pipeline(tmp_path, batch_size=1, training=False)
    lost = " ".join(unwrapped(plan).split())
    assert expected in lost
    assert ("dropped" in lost or "frames" in lost) is bool(expected)


@pytest.mark.parametrize("length", range(0, 48, 3))
def test_a_gif_that_is_cut_in_its_first_frame_is_a_bad_file(tmp_path, length):
    (tmp_path / "a").mkdir()
    options, image = gif_of(3)
    image.save(tmp_path / "a" / "x", **options)
    (tmp_path / "a" / "x").write_bytes((tmp_path / "a" / "x").read_bytes()[:length])
    with pytest.raises(PipelineError, match="Expected images that TensorFlow decodes"):
        plan_pipeline(tmp_path, batch_size=1, training=False)
