"""Random flips: image, masks and boxes alike, by the example's seed."""

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.errors import PipelineError
from tfopt.pipelines import RandomFlip, arrays, build_pipeline, plan_pipeline

RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.random((40, 4, 6, 3)).astype("float32")
MASKS = RANDOM.integers(0, 9, (40, 4, 6))
LOW = RANDOM.random((40, 5, 2)) / 2
BOXES = np.concatenate([LOW, LOW + 0.1 + RANDOM.random((40, 5, 2)) * 0.4], axis=-1).astype("float32")
BOXES[:, 3:] = 0  # padding


def flipped(axis, image, mask, boxes):
    """What NumPy makes of an example."""
    low, high = ((0, 2), (1, 3))[axis]
    moved = boxes.copy()
    moved[:3, low], moved[:3, high] = 1 - boxes[:3, high], 1 - boxes[:3, low]
    return np.flip(image, axis), np.flip(mask, axis), moved


@pytest.mark.parametrize(("name", "axis"), first_quick([("horizontal", 1), ("vertical", 0)]))
def test_everything_on_the_image_moves_with_it(name, axis):
    data = {"image": IMAGES, "mask": MASKS, "boxes": BOXES, "number": np.arange(40)}
    flip = RandomFlip(("mask", "boxes"), axis=name)
    epochs = []
    dataset = build_pipeline(data, batch_size=10, augment=flip, seed=3)
    for _ in range(2):
        found = {}
        for example in dataset.unbatch().as_numpy_iterator():
            number = example["number"]
            expected = IMAGES[number], MASKS[number], BOXES[number]
            found[number] = not np.array_equal(example["image"], IMAGES[number])
            if found[number]:
                expected = flipped(axis, *expected)
            for key, truth in zip(("image", "mask", "boxes"), expected, strict=True):
                np.testing.assert_allclose(example[key], truth, atol=1e-6)
        assert len(found) == 40
        assert 8 < sum(found.values()) < 32
        epochs.append(found)
    assert epochs[0] != epochs[1]


def test_both_flips_are_drawn_apart():
    data = (IMAGES, np.arange(40))
    dataset = build_pipeline(data, batch_size=40, augment=[RandomFlip(), RandomFlip(axis="vertical")], seed=3)
    ((images, numbers),) = dataset.as_numpy_iterator()
    forms = [IMAGES, IMAGES[:, :, ::-1], IMAGES[:, ::-1], IMAGES[:, ::-1, ::-1]]
    found = set()
    for image, number in zip(images, numbers, strict=True):
        found.add([np.array_equal(image, form[number]) for form in forms].index(True))
    assert found == {0, 1, 2, 3}


def test_any_number_of_boxes():
    counts = RANDOM.integers(0, 5, 40)
    ragged = tf.RaggedTensor.from_row_lengths(BOXES[:, :1].repeat(5, 1).reshape(-1, 4)[: counts.sum()], counts)
    source = arrays((IMAGES, {"boxes": ragged, "number": np.arange(40)}))
    dataset = build_pipeline(source, batch_size=8, augment=RandomFlip("boxes"), pad="batch", seed=1)
    seen = 0
    for image, rest in dataset.unbatch().as_numpy_iterator():
        number = rest["number"]
        boxes = ragged[number].numpy()
        if not np.array_equal(image, IMAGES[number]):
            boxes = np.stack([boxes[:, 0], 1 - boxes[:, 3], boxes[:, 2], 1 - boxes[:, 1]], -1)
            seen += len(boxes)
        np.testing.assert_allclose(rest["boxes"][: len(boxes)], boxes, atol=1e-6)
        assert not rest["boxes"][len(boxes) :].any()
    assert seen > 10


@pytest.mark.slow
def test_parts_that_would_stay_behind_are_refused():
    with pytest.raises(PipelineError, match=r"in a flip. Found '1/mask'.*Pass flip_with=\('1/mask',\)"):
        plan_pipeline((IMAGES, {"mask": MASKS}), batch_size=4, augment=RandomFlip())
    left = plan_pipeline((IMAGES, {"mask": MASKS}), batch_size=40, augment=RandomFlip({"mask": False}), training=False)
    np.testing.assert_array_equal(next(iter(left.build()))[1]["mask"], MASKS)
    with pytest.raises(PipelineError, match=r"for 'masks' of `flip_with`.*Did you mean"):
        plan_pipeline((IMAGES, {"mask": MASKS}), batch_size=4, augment=RandomFlip("masks"))
    with pytest.raises(PipelineError, match="Expected an image to flip"):
        plan_pipeline(MASKS, batch_size=4, augment=RandomFlip())
    in_pixels = build_pipeline((IMAGES, 30 * BOXES), batch_size=40, augment=RandomFlip("1"), seed=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"normalised.*rel_yxyx.*Found"):
        list(in_pixels)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ((3.5,), {}, TypeError, "flip_with"),
        ((), {"axis": "left"}, ValueError, "axis"),
        ((), {"axis": 1}, TypeError, "axis"),
    ],
)
def test_wrong_values_are_refused(arguments, options, error, text):
    with pytest.raises(error, match=f"`{text}`"):
        RandomFlip(*arguments, **options)
