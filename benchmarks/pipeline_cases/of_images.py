"""Cases of image files: JPEGs cropped at random, from files and from records, and planning over many files."""

import io
import os
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import tensorflow as tf
from PIL import Image

from pipeline_cases import HAND, TFOPT, Case, Way, at_least, no_way
from pipeline_cases.by_grain import Rows, by_grain, of_records, window, write
from pipeline_cases.of_arrays import AUTOTUNE, tfopt
from pipeline_cases.of_records import side_by_side, write_plain
from tfopt.bench.workloads import photos
from tfopt.pipelines import RandomCrop, images, records, write_records

SIZE = photos.SIZE
_CLASSES = 10
_BY_HAND = "extract_jpeg_shape, sample_distorted_bounding_box, decode_and_crop_jpeg, resize"


def photo_files(scale):
    """Paths of photographs, and their numbers."""
    paths = sorted(map(str, photos.folder(scale.photos).glob("*/*.jpg")))
    return paths, np.arange(len(paths))


def cropped(contents):
    """By hand: only a random window is decoded."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(contents),
        [[[0.0, 0.0, 1.0, 1.0]]],
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        min_object_covered=0.0,
    )
    cut = tf.io.decode_and_crop_jpeg(contents, tf.concat([begin[:2], size[:2]], 0), channels=3)
    return tf.cast(tf.round(tf.image.resize(cut, (SIZE, SIZE))), tf.uint8)


def by_hand(paths, numbers, batch):
    """By hand: shuffled paths, read and cropped in one map, in any order."""
    dataset = tf.data.Dataset.from_tensor_slices((paths, numbers)).shuffle(len(paths))
    dataset = dataset.map(lambda path, at: (cropped(tf.io.read_file(path)), at), num_parallel_calls=AUTOTUNE)
    return unordered(dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE))


def unordered(dataset):
    """Lets elements overtake each other."""
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def by_pil(example, random):
    """As torchvision does it: Pillow decodes the file, and resizes the window, by its own shortcut."""
    source, label = example
    with Image.open(source) as image:
        image = image.convert("RGB")
    box = window(*image.size, random)
    small = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
    return np.asarray(small), label


def crop_files(folder, scale):
    """JPEG files."""
    files, batch = photo_files(scale), scale.photo_batch
    return Case(
        question=f"{len(files[0]):,} JPEG files of 50 KB, cropped at random to 224×224",
        goal=at_least(1.0),
        ways=[
            Way(TFOPT, "images(…), crop=RandomCrop(224)", lambda: tfopt(images(files), batch, crop=RandomCrop(SIZE))),
            Way(HAND, f"shuffled paths; {_BY_HAND}", lambda: by_hand(*files, batch)),
            by_grain("Pillow, random_map, batch", lambda: Rows(*files), batch, random_function=by_pil),
        ],
        examples=len(files[0]),
        batch=batch,
    )


def crop_records(folder, scale):
    """The same in records."""
    files, batch = photo_files(scale), scale.photo_batch
    write_records(images(files), folder / "own", shards=8)
    contents = [(Path(path).read_bytes(), number) for path, number in zip(*files, strict=True)]
    plain = write_plain(folder, (serialised(*each) for each in contents))
    description = {"image": tf.io.FixedLenFeature((), tf.string), "label": tf.io.FixedLenFeature((), tf.int64)}

    def from_plain():
        def example(record):
            parsed = tf.io.parse_single_example(record, description)
            return cropped(parsed["image"]), parsed["label"]

        dataset = side_by_side(plain, len(contents)).map(example, num_parallel_calls=AUTOTUNE)
        return unordered(dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE))

    def opened(record, random):
        return by_pil((io.BytesIO(record[8:]), np.frombuffer(record, np.int64, 1)[0]), random)

    array_record = write(folder / "photos.array_record", (number.tobytes() + image for image, number in contents))
    return Case(
        question="The same from records",
        goal=at_least(1.0),
        ways=[
            Way(
                TFOPT,
                "write_records, records(folder), crop=RandomCrop(224)",
                lambda: tfopt(records(folder / "own"), batch, crop=RandomCrop(SIZE)),
            ),
            Way(HAND, f"plain TFRecords, shuffled; parse_single_example, {_BY_HAND}", from_plain),
            by_grain("ArrayRecord, Pillow", of_records(array_record), batch, random_function=opened),
        ],
        examples=len(contents),
        batch=batch,
    )


def serialised(contents, number):
    """An image and its number as a tf.train.Example."""
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[contents])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def many_files(folder, count):
    """A folder with a subfolder for each class, and the same small JPEG many times."""
    image = np.random.default_rng(0).integers(256, size=(32, 32, 3), dtype=np.uint8)
    contents = tf.io.encode_jpeg(image).numpy()
    for number in range(count):
        place = folder / "many" / f"{number % _CLASSES}"
        if number < _CLASSES:
            place.mkdir(parents=True)
        (place / f"{number:05}.jpg").write_bytes(contents)
    return folder / "many"


def listed(folder, batch):
    """By hand: os.scandir of each class, then a map over shuffled paths."""
    classes = sorted(entry.name for entry in os.scandir(folder))
    paths, labels = [], []
    for label, name in enumerate(classes):
        found = sorted(entry.path for entry in os.scandir(folder / name))
        paths += found
        labels += [label] * len(found)
    dataset = tf.data.Dataset.from_tensor_slices((paths, labels)).shuffle(len(paths))
    dataset = dataset.map(
        lambda path, label: (tf.io.decode_jpeg(tf.io.read_file(path), channels=3), label), num_parallel_calls=AUTOTUNE
    )
    return dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE)


def planning(first, folder, scale):
    """images() over many files."""
    many, kept = many_files(folder, scale.files), folder / "kept"

    def planned():
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(kept)):
            if first:
                shutil.rmtree(kept, ignore_errors=True)
            return tfopt(images(many), scale.photo_batch)

    planned()
    return Case(
        question=f"Plan and build over {scale.files:,} image files, {'for the first time' if first else 'later'}",
        timed="plan",
        goal=None,
        ways=[
            Way(TFOPT, "images(folder): each file is looked at, once", planned),
            Way(
                HAND,
                "os.scandir, from_tensor_slices, shuffle, map, batch: no file is looked at",
                lambda: listed(many, scale.photo_batch),
            ),
            no_way("Grain", "it lists no files"),
        ],
        examples=scale.files,
        batch=scale.photo_batch,
    )


CASES = {
    "images, first plan": partial(planning, True),
    "images, later plan": partial(planning, False),
    "jpeg crop, files": crop_files,
    "jpeg crop, records": crop_records,
}
