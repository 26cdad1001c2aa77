"""The stages of single examples: crops fused with decoding or behind a cache, the same pixels; the shuffle's buffer."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.pipelines import CentralCrop, RandomCrop, build_pipeline, plan_pipeline
from tfopt.pipelines.inspection.facts import MIB
from tfopt.pipelines.shared.crop import cut_decoded
from tfopt.pipelines.stages.order_stages import fitting_buffer


@pytest.fixture
def jpegs(tmp_path):
    """A folder of 12 JPEGs of unlike sizes, 2 classes; returns it and the files in order."""
    random = np.random.default_rng(0)
    paths = []
    for number in range(12):
        rough = tf.constant(random.integers(0, 256, (7, 9, 3)), tf.float32)
        image = tf.cast(tf.image.resize(rough, (60 + 3 * number, 90 - 2 * number), "bicubic"), tf.uint8)
        path = tmp_path / "jpegs" / "ab"[number // 6] / f"{number:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_jpeg(image).numpy())
        paths.append(path)
    return tmp_path / "jpegs", paths


def images(dataset):
    return np.concatenate([batch[0].numpy() for batch in dataset])


def stage(plan, name):
    return next(stage for stage in plan.stages if stage.name == name)


def test_a_crop_is_fused_with_decoding_where_nothing_is_cached_before_it(jpegs):
    folder, _ = jpegs
    for crop, cache, fused in [
        (RandomCrop(32), None, True),
        (RandomCrop(32), "memory", False),
        (CentralCrop(32), None, True),
        (CentralCrop(32), "memory", True),
    ]:
        plan = plan_pipeline(folder, batch_size=4, crop=crop, cache=cache)
        assert ("only the crop is decoded" in stage(plan, "crop").reason) is fused


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_a_central_crop_is_that_of_the_decoded_image(jpegs, tmp_path, cache):
    folder, paths = jpegs
    crop = CentralCrop((24, 32))
    cache = tmp_path / "caches" if cache == "folder" else cache
    dataset = build_pipeline(folder, batch_size=5, training=False, crop=crop, cache=cache)
    expected = [cut_decoded(crop, tf.io.decode_jpeg(path.read_bytes()), None)[0] for path in paths]
    for _ in range(2):
        np.testing.assert_array_equal(images(dataset), expected)
    assert dataset.element_spec[0] == tf.TensorSpec((None, 24, 32, 3), tf.uint8)


@pytest.mark.slow
def test_under_a_seed_a_random_crop_is_the_same_whatever_is_cached(jpegs, free_memory):
    folder, _ = jpegs
    epochs = []
    for free_mib, on in ((10_000.0, "memory"), (0.0, None)):
        free_memory(free_mib)
        plan = plan_pipeline(folder, batch_size=4, crop=RandomCrop(16), seed=3)
        assert plan.to_dict()["cache"] == on
        dataset = plan.build()
        epochs.append([images(dataset) for _ in range(3)])
    np.testing.assert_array_equal(*epochs)
    assert not np.array_equal(*epochs[0][:2])


@pytest.mark.slow
def test_a_random_crop_is_another_for_each_image_and_epoch(jpegs):
    folder, _ = jpegs
    for cache in (None, "memory"):
        dataset = build_pipeline(folder, batch_size=4, crop=RandomCrop(16), cache=cache, shuffle=False)
        first, second = images(dataset), images(dataset)
        assert not any(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_the_order_is_crop_then_transform_then_augment(jpegs):
    folder, _ = jpegs
    shapes = []

    def transform(image, label):
        shapes.append(("transform", image.shape.as_list(), image.dtype))
        return tf.cast(image, tf.float32) / 255, label

    def augment(image, label, seed):
        shapes.append(("augment", image.shape.as_list(), image.dtype))
        return image + tf.random.stateless_uniform((), seed), label

    for cache in (None, "memory"):
        shapes.clear()
        build_pipeline(folder, batch_size=4, crop=RandomCrop(16), transform=transform, augment=augment, cache=cache)
        assert shapes[-2:] == [("transform", [16, 16, 3], tf.uint8), ("augment", [16, 16, 3], tf.float32)]


@pytest.mark.slow
def test_images_in_records_and_arrays_are_cropped_too(jpegs, tmp_path):
    _, paths = jpegs
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for path in paths:
            writer.write(path.read_bytes())
    crop = CentralCrop(16)
    expected = [cut_decoded(crop, tf.io.decode_jpeg(path.read_bytes()), None)[0] for path in paths]
    options = {"batch_size": 12, "training": False, "crop": crop}
    (encoded,) = build_pipeline(str(tmp_path / "a.tfrecord"), **options)
    np.testing.assert_array_equal(encoded, expected)
    pixels = np.random.default_rng(1).integers(0, 256, (12, 40, 30, 3)).astype("uint8")
    ((decoded,),) = ([batch["image"]] for batch in build_pipeline({"image": pixels}, **options))
    np.testing.assert_array_equal(decoded, [cut_decoded(crop, tf.constant(image), None)[0] for image in pixels])


@pytest.mark.parametrize("rows", [np.zeros((8, 4)), {"x": np.zeros((8, 4, 4, 3))}, np.array([[b"a"]] * 8)])
def test_examples_without_an_image_are_refused(rows):
    with pytest.raises(ValueError, match="Expected an image to crop: the first of a tuple, or 'image' of a dict"):
        plan_pipeline(rows, batch_size=4, crop=RandomCrop(2))


def test_the_shuffle_buffer_holds_everything_that_fits():
    assert fitting_buffer(1024, MIB) == (1024, "all elements: 1.0 GiB, within the 1,024 MiB for it")
    assert fitting_buffer(10**6, MIB, shared=True)[0] == 10**6
    buffer, reason = fitting_buffer(2000, MIB)
    assert buffer == 1024
    assert "1,024 of 2,000 elements of 1.0 MiB each" in reason
    assert "not mixed" in reason


def test_the_first_batch_does_not_wait_for_more_than_is_mixed_well():
    assert fitting_buffer(100_000, 1)[0] == 100_000
    buffer, reason = fitting_buffer(10**6, 1)
    assert buffer == 100_000
    assert "the first batch waits for them" in reason
    assert fitting_buffer(10**6, 1, at_hand=True)[0] == fitting_buffer(10**6, 1, shared=True)[0] == 10**6


def test_the_shuffle_buffer_is_bounded_where_the_count_is_unknown():
    assert fitting_buffer(None, MIB, shared=True)[0] == 1024
    assert fitting_buffer(None, 1)[0] == 10_000
    assert fitting_buffer(None, 10.0**12)[0] == 1
