import io

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from quick import first_quick

from tfopt.pipelines import CentralCrop, RandomCrop, Source, build_pipeline, plan_pipeline

HEIGHT, WIDTH, SIZE = 48, 64, (16, 24)
ROWS, COLUMNS = np.mgrid[:HEIGHT, :WIDTH]
BOXES = np.array([[0.1, 0.2, 0.9, 0.8], [0.0, 0.0, 0.3, 0.4], [0.4, 0.4, 0.6, 0.6]], np.float32)
CROPS = [CentralCrop(SIZE, fraction=0.8), RandomCrop(SIZE, area=(0.3, 0.9))]


def examples(count=6):
    """Each pixel of image and mask says where it lies."""
    return {
        "image": np.stack([np.stack([ROWS, COLUMNS], -1)] * count).astype("float32"),
        "mask": np.stack([ROWS * 100 + COLUMNS] * count).astype("int32"),
        "flags": np.stack([(ROWS * 100 + COLUMNS)[..., None] % 7 == 0] * count),
        "image_right": np.stack([np.stack([COLUMNS], -1)] * count).astype("float32"),
        "boxes": np.stack([BOXES] * count),
        "label": np.arange(count),
    }


ALL = ("mask", "flags", "image_right", "boxes")


def window(image):
    """Start and size of the window that was cropped to `image`, whose pixels lie on a line apart from the sides."""
    rows, columns = image[[3, -4], 5, 0], image[5, [3, -4], 1]
    size = np.array([np.ptp(rows), np.ptp(columns)]) / (np.array(SIZE) - 7)
    start = np.array([rows[0], columns[0]]) + 0.5 - 3.5 * size
    size = size * SIZE
    np.testing.assert_allclose([start, size], np.round([start, size]), atol=1e-3)
    return np.round(start).astype(int), np.round(size).astype(int)


def nearest(pixels, start, size):
    rows, columns = (s + ((np.arange(n) + 0.5) * k / n).astype(int) for s, k, n in zip(start, size, SIZE, strict=True))
    return pixels[rows][:, columns]


def moved(boxes, start, size):
    sides, start, size = (np.tile(pair, 2) for pair in ((HEIGHT, WIDTH), start, size))
    return np.clip((boxes * sides - start) / size, 0, 1)


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("cache", first_quick([None, "memory", "folder"]))
def test_masks_images_and_boxes_move_with_the_image(crop, cache, tmp_path):
    data = examples()
    cache = str(tmp_path / "c") if cache == "folder" else cache
    dataset = build_pipeline(data, batch_size=2, crop=crop, crop_with=ALL, seed=3, cache=cache)
    windows = set()
    for _ in range(2):
        for batch in dataset.as_numpy_iterator():
            for index, image in enumerate(batch["image"]):
                start, size = window(image)
                windows.add((*start, *size))
                for name in ("mask", "flags"):
                    np.testing.assert_array_equal(batch[name][index], nearest(data[name][0], start, size))
                np.testing.assert_array_equal(batch["image_right"][index], image[..., 1:])
                np.testing.assert_allclose(batch["boxes"][index], moved(BOXES, start, size), atol=1e-5)
    assert len(windows) == (12 if crop.random else 1)


def encoded(kind):
    file = io.BytesIO()
    pixels = np.stack([ROWS * 5, COLUMNS * 3, ROWS + COLUMNS], -1).astype("uint8")
    Image.fromarray(pixels).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_masks_of_encoded_images_move_as_those_of_decoded_ones(crop, kind):
    contents = tf.data.Dataset.from_tensors(encoded(kind)).repeat(4)
    target = {"mask": examples(1)["mask"][0], "boxes": BOXES}

    def decode(data):
        return tf.ensure_shape(tf.io.decode_image(data, channels=3, expand_animations=False), (None, None, 3)), target

    whole = Source(name="whole", dataset=lambda: contents, decode=decode)
    window_only = Source(
        name="window", dataset=lambda: contents, decode=decode, encoded=lambda data: (data, target), only_jpeg=False
    )
    options = {"batch_size": 4, "crop": crop, "crop_with": ("mask", "1/boxes"), "seed": 1, "cache": None}
    first, second = (next(build_pipeline(source, **options).as_numpy_iterator()) for source in (whole, window_only))
    tf.nest.map_structure(np.testing.assert_array_equal, first, second)
    corner = first[1]["mask"][0, 0, 0]
    shown = next(iter(build_pipeline(whole, **options)))[0][0, 0, 0].numpy().astype(float) / (5, 3, 1)
    np.testing.assert_allclose(shown[:2], (corner // 100, corner % 100), atol=3)


IMAGES = np.zeros((4, HEIGHT, WIDTH, 3), "uint8")
BESIDE = {
    "mask": np.zeros((4, HEIGHT, WIDTH), "int32"),
    "depth": np.zeros((4, HEIGHT, WIDTH, 1), "float32"),
    "pixels": np.zeros((4, HEIGHT, WIDTH, 3), "uint8"),
    "bbox": np.zeros((4, 4), "int32"),
    "unnamed": np.zeros((4, 7, 4), "float32"),
    "corners": np.zeros((4, 4), "float32"),
    "keypoints": np.zeros((4, 5, 2), "float32"),
    "bbox_of_classes": np.zeros((4, 3, 5), "float32"),  # a fifth number
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_what_would_stay_behind_is_refused(name):
    for data, path in (
        ({"image": IMAGES, name: BESIDE[name]}, name),
        ((IMAGES, {name: BESIDE[name]}), f"1/{name}"),
        ((IMAGES, np.arange(4), BESIDE[name]), "2"),
    ):
        if path == "2" and name in ("bbox", "keypoints", "bbox_of_classes"):  # known by their names alone
            continue
        text = rf"move with the image.* Found '{path}' .*crop_with=\('{path}',\).*crop_with={{'{path}': False}}"
        with pytest.raises(ValueError, match=text):
            plan_pipeline(data, batch_size=2, crop=CentralCrop(8))
        plan_pipeline(data, batch_size=2, crop=CentralCrop(8), crop_with={path: False})


def test_labels_and_features_are_not_taken_for_masks_or_boxes():
    beside = (np.zeros((4, 10), "float32"), np.zeros((4, 12, 5), "float32"), np.arange(4), np.zeros((4, 4), "int32"))
    plan = plan_pipeline((IMAGES, *beside), batch_size=2, crop=CentralCrop(8))
    assert "moves" not in plan.stage("crop").reason


def test_the_plan_says_what_moves():
    plan = plan_pipeline(examples(), batch_size=2, crop=RandomCrop(8), crop_with=ALL)
    assert "cropped with the image: boxes, flags, image_right, mask" in plan.stage("crop").reason
    assert plan.to_dict()["options"]["crop_with"] == {**dict.fromkeys(ALL, True)}


def plan(**options):
    return plan_pipeline(examples(), **{"batch_size": 2, "crop": CentralCrop(8), "crop_with": ALL, **options})


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"crop": None}, ValueError, "Expected a `crop` for `crop_with`"),
        ({"crop_with": 3.0}, TypeError, "names for `crop_with`.* Received: 3.0"),
        (
            {"crop_with": (*ALL, "masks")},
            ValueError,
            "Expected one part of the example for 'masks' .* Did you mean 'mask'",
        ),
        ({"crop_with": (*ALL, "image")}, ValueError, "Found 'image', the image itself"),
        ({"crop_with": (*ALL, "label")}, ValueError, "'label' .*cannot move"),
    ],
)
def test_wrong_names_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        plan(**options)


@pytest.mark.parametrize("name", ["boxes_xyxy", "boxes_xywh", "boxes_center_xywh", "boxes_rel_xyxy"])
def test_boxes_in_another_format_are_refused_by_name(name):
    data = {"image": IMAGES, name: np.zeros((4, 3, 4), "float32")}
    with pytest.raises(ValueError, match=r"normalised.*ymin, xmin, ymax, xmax.*rel_yxyx.*convert_format"):
        plan_pipeline(data, batch_size=2, crop=CentralCrop(8), crop_with=(name,))


@pytest.mark.slow
def test_what_moves_is_in_the_key_of_a_cache_on_disk(tmp_path):
    ways = [ALL, dict.fromkeys(ALL, True), {**dict.fromkeys(ALL, True), "boxes": False}]
    keys = [plan(crop_with=way, cache=str(tmp_path), training=False).to_dict()["cache_key"] for way in ways]
    assert keys[0] == keys[1] != keys[2]


def test_boxes_in_pixels_and_masks_of_another_size_are_refused_when_read():
    data = {"image": IMAGES, "boxes": np.full((4, 3, 4), 30, "float32")}
    with pytest.raises(Exception, match=r"normalised.*rel_yxyx.*Found 30"):
        plan_pipeline(data, batch_size=2, crop=CentralCrop(8), crop_with="boxes")

    def generate():
        yield np.zeros((48, 64, 3), "uint8"), np.zeros((24, 32), "uint8")

    specs = tf.TensorSpec((None, None, 3), tf.uint8), tf.TensorSpec((None, None), tf.uint8)
    other = tf.data.Dataset.from_generator(generate, output_signature=specs)
    with pytest.raises(Exception, match=r"Expected .*1.* of the image.*height and width, \[48 64\]\. Found \[24 32\]"):
        plan_pipeline(other, batch_size=1, crop=CentralCrop(8), crop_with=1)
