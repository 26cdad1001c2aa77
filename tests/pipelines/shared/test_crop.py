import dataclasses
import io

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tfopt.pipelines.shared.crop import CentralCrop, RandomCrop, cut_decoded, cut_encoded
from tfopt.pipelines.sources.image_files import decode_image

ANY = RandomCrop((20, 17), area=(0.01, 1.0), aspect_ratio=(0.2, 5.0))
NARROW = RandomCrop(8, area=(0.3, 0.4), aspect_ratio=(1.0, 1.25))
SHAPE, SEED = tf.TensorSpec((3,), tf.int32), tf.TensorSpec((2,), tf.int32)


def photo(height, width, seed=0):
    """Pixels with both areas of one colour and sharp edges."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (height // 5 + 1, width // 5 + 1, 3))
    pixels = coarse.repeat(5, axis=0).repeat(5, axis=1)[:height, :width] + random.integers(-20, 20, (height, width, 3))
    return np.clip(pixels, 0, 255).astype(np.uint8)


def encoded(pixels, kind, mode="RGB", **options):
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


def turned():
    """EXIF data that says: turn it by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


KINDS = {
    "4:2:0": ("JPEG", {}),
    "4:2:2": ("JPEG", {"subsampling": 1}),
    "4:4:4": ("JPEG", {"subsampling": 0}),
    "progressive": ("JPEG", {"progressive": True}),
    "restarts": ("JPEG", {"restart_marker_blocks": 2}),
    "turned": ("JPEG", {"exif": turned()}),
    **{f"{mode} {kind}": (kind, {"mode": mode}) for kind in ("JPEG", "PNG", "BMP") for mode in ("L", "RGB")},
    "CMYK": ("JPEG", {"mode": "CMYK"}),
    **{f"{mode} PNG": ("PNG", {"mode": mode}) for mode in ("LA", "RGBA", "P")},
    "palette with transparency": ("PNG", {"mode": "P", "transparency": 3}),
    "GIF": ("GIF", {}),
    "RGBA BMP": ("BMP", {"mode": "RGBA"}),
}
del KINDS["RGB JPEG"]  # 4:2:0


def of_kind(name, pixels, **options):
    kind, own = KINDS[name]
    return encoded(pixels, kind, **own, **options)


def both_ways(crop):
    """A function of encoded bytes and a seed: the crop decoded with the image, and the crop of the decoded image."""

    @tf.function(input_signature=[tf.TensorSpec((), tf.string), SEED])
    def crops(contents, seed):
        seed = seed if crop.random else None
        with tf.device("CPU:0"):  # as in a pipeline
            return cut_encoded(crop, contents, seed)[0], cut_decoded(crop, decode_image(contents), seed)[0]

    return crops


BOTH = {crop: both_ways(crop) for crop in (ANY, CentralCrop((20, 17)), CentralCrop(33, fraction=0.41))}


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_window_decoded_is_the_window_of_all_decoded(kind):
    random = np.random.default_rng(1)
    seen = set()
    for height, width in [(61, 83), (48, 64), (90, 33), (40, 37)]:
        contents = of_kind(kind, photo(height, width))
        for crop, crops in BOTH.items():
            for _ in range(12 if crop.random else 1):
                fused, plain = crops(contents, random.integers(-(2**31), 2**31, 2))
                assert (fused.shape, fused.dtype) == ((*crop.size, 3), tf.uint8)
                np.testing.assert_array_equal(fused, plain)
                seen.add(fused.numpy().tobytes())
    assert len(seen) > 40


@pytest.mark.parametrize("size", [(1, 1), (1, 60), (60, 1), (2, 3), (9, 300), (300, 9)])
@pytest.mark.parametrize("kind", ["4:2:0", "progressive", "RGB PNG", "GIF", "RGB BMP"])
def test_tiny_and_extreme_images(kind, size):
    contents = of_kind(kind, np.full((*size, 3), (90, 140, 30), np.uint8))
    for crops in BOTH.values():
        fused, plain = crops(contents, (3, 4))
        # One colour stays one colour, wherever the window lies.
        assert np.ptp(fused.numpy(), axis=(0, 1)).max() == 0
        np.testing.assert_array_equal(fused, plain)


CROPS = [ANY, NARROW, RandomCrop(1), *map(CentralCrop, (1, (7, 3), (2, 9000)))]
CROPS += [CentralCrop(5, fraction=1.0), CentralCrop((3, 4), fraction=1e-9)]
WINDOWS = {crop: tf.function(crop.window, input_signature=[SHAPE, SEED]) for crop in CROPS}
SIDES = st.integers(1, 70) | st.integers(1, 2**16) | st.sampled_from([2**16, 2**20])


@pytest.mark.slow
@settings(max_examples=150)
@given(st.sampled_from(list(WINDOWS)), SIDES, SIDES, st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2))
def test_windows_lie_inside_the_image(crop, height, width, seed):
    begin, size, _ = (part.numpy().tolist() for part in WINDOWS[crop]((height, width, 3), seed))
    assert (begin[2], size[2]) == (0, -1)
    for start, length, side in zip(begin, size, (height, width), strict=False):
        assert 0 <= start < start + length <= side
    if crop.random:
        end = begin[1] + size[1]
        assert begin[1] == 0 or begin[1] % 2 == 1
        assert end == width or end % 2 == 1


def windows(crop, shape, number):
    return np.array([tf.concat(WINDOWS[crop](shape, (seed, 7))[:2], 0).numpy() for seed in range(number)])


def test_random_windows_keep_to_their_ranges_and_fill_them():
    top, left, _, height, width, _ = windows(NARROW, (400, 600, 3), 300).T
    widened = 2 / width.min()
    for found, least, largest in ((height * width / (400 * 600), 0.3, 0.4), (width / height, 1.0, 1.25)):
        assert least * (1 - widened) < found.min() < found.max() < largest * (1 + widened)
        assert np.ptp(found) > 0.88 * (largest - least)
    assert np.ptp(top) > 120
    assert np.ptp(left) > 200
    # TensorFlow's default `min_object_covered` of 0.1 would leave out the smallest ones.
    assert windows(RandomCrop(1), (400, 600, 3), 300)[:, 3:5].prod(axis=1).min() / (400 * 600) < 0.1
    # The whole image where there is no room.
    assert windows(NARROW, (10, 600, 3), 3).tolist() == [[0, 0, 0, 10, 600, -1]] * 3


@pytest.mark.parametrize(
    ("crop", "shape", "expected"),
    [
        (CentralCrop(224), (256, 256), [16, 16, 224, 224]),
        (CentralCrop(224), (340, 453), [21, 77, 298, 298]),
        (CentralCrop((100, 200), fraction=1.0), (300, 400), [50, 0, 200, 400]),
        (CentralCrop((100, 200), fraction=0.5), (300, 400), [100, 100, 100, 200]),
        (CentralCrop(224, fraction=1.0), (65535, 1), [32767, 0, 1, 1]),
    ],
)
def test_central_windows(crop, shape, expected):
    begin, size, _ = crop.window(tf.constant((*shape, 3)), None)
    assert [*begin.numpy()[:2], *size.numpy()[:2]] == expected


@pytest.mark.parametrize(
    "dtype", ["uint8", "int8", "uint16", "int16", "int32", "int64", "bfloat16", "float16", "float32", "float64"]
)
def test_pixels_are_those_of_resize_rounded_to_the_dtype(dtype):
    dtype = tf.as_dtype(dtype)
    image = tf.cast(photo(64, 48)[..., :2], tf.float32) / 2
    image = tf.cast(image if dtype.is_floating else tf.round(image), dtype)
    found, _ = cut_decoded(CentralCrop((30, 20)), image, None)
    expected = tf.image.resize(image[4:60, 5:42], (30, 20)).numpy()
    assert (found.dtype, found.shape) == (dtype, (30, 20, 2))
    expected = expected if dtype.is_floating else np.round(expected)
    np.testing.assert_array_equal(found, expected.astype(dtype.as_numpy_dtype))
    assert np.ptp(found.numpy().astype(float)) > 90


@pytest.mark.parametrize("shape", [(1, 1), (9, 7), (20, 40), (41, 61), (90, 120)])
def test_pixels_are_rounded_half_to_even_whatever_the_size_of_the_window(shape):
    """Small and large windows are resized in two ways; halves are frequent at a scale of 2."""
    image, crop = tf.constant(photo(*shape)), CentralCrop((20, 30), fraction=1.0)
    found, window = cut_decoded(crop, image, None)
    exact = tf.image.resize(tf.slice(image, window.begin, window.size), (20, 30)).numpy()
    np.testing.assert_array_equal(found, np.rint(exact).astype(np.uint8))


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64"])
def test_the_largest_numbers_do_not_wrap(dtype):
    largest = tf.fill((5, 5, 1), tf.as_dtype(dtype).max)
    found = cut_decoded(CentralCrop(3), largest, None)[0].numpy()
    assert (found > largest.numpy().max() * 0.99).all()


@pytest.mark.parametrize(
    "image", [tf.zeros((4, 4)), tf.zeros((1, 4, 4, 3)), tf.zeros((4, 4, 3), tf.bool), tf.zeros((4, 4, 3), tf.uint32)]
)
def test_other_tensors_are_refused(image):
    text = rf"shape \(height, width, channels\).* Found shape .*{image.dtype.name}\. Give it"
    with pytest.raises(ValueError, match=text):
        cut_decoded(CentralCrop(3), image, None)


def test_crops_know_what_they_are():
    assert (RandomCrop(3).random, CentralCrop(3).random) == (True, False)
    assert RandomCrop(np.int64(3)) == RandomCrop([3, 3]) == RandomCrop((3, 3), area=(0.08, 1))
    assert (RandomCrop(3).aspect_ratio, CentralCrop((3, 5)).size) == ((3 / 4, 4 / 3), (3, 5))
    with pytest.raises(dataclasses.FrozenInstanceError):
        RandomCrop(3).size = 4


WRONG = [
    *((size, {}, TypeError, r"size.*\. Received: .*\. Pass pixels") for size in (2.0, True, "224", (1, 2, 3), None)),
    (0, {}, ValueError, r"size to be at least 1\. Received: 0"),
    ((3, -1), {}, ValueError, r"size to be at least 1\. Received: -1"),
]
OF_RANDOM_CROP = [
    ({"area": 0.5}, TypeError, "least and the largest value for `area`"),
    ({"area": (0.5, "1")}, TypeError, "area to be a number. Received: '1'"),
    ({"area": (0.0, 1.0)}, ValueError, "area to be above 0. Received: 0.0"),
    ({"area": (0.5, 1.1)}, ValueError, "area to be at most 1. Received: 1.1"),
    ({"area": (0.9, 0.5)}, ValueError, "least value of `area` first"),
    ({"aspect_ratio": (1, float("inf"))}, ValueError, "aspect_ratio to be a finite number. Received: inf"),
    ({"aspect_ratio": (float("nan"), 1)}, ValueError, "aspect_ratio to be a finite number. Received: nan"),
]
OF_CENTRAL_CROP = [
    ({"fraction": 1.5}, ValueError, "fraction to be at most 1. Received: 1.5"),
    ({"fraction": None}, TypeError, "fraction to be a number"),
]


@pytest.mark.parametrize(
    ("make", "size", "options", "error", "text"),
    [
        *((make, *case) for make in (RandomCrop, CentralCrop) for case in WRONG),
        *((RandomCrop, 3, *case) for case in OF_RANDOM_CROP),
        *((CentralCrop, 3, *case) for case in OF_CENTRAL_CROP),
    ],
)
def test_wrong_values_are_refused(make, size, options, error, text):
    with pytest.raises(error, match=text):
        make(size, **options)
