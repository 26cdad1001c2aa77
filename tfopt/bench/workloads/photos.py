"""JPEG files of ImageNet's size, cut from scikit-learn's two photographs, pipelines over them, and nets for them."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfopt.bench.workloads import require

SIZE = 224
PHOTOGRAPHS = 256  # different ones: to write more of them would take longer than to train on them
BATCHES = 40  # in `rows`, so that no epoch ends while steps are timed
_VERSION = 1  # of the files; another number, another folder
_WHOLE = [[[0.0, 0.0, 1.0, 1.0]]]
_AREA, _ASPECT_RATIO, _FRACTION = (0.08, 1.0), (3 / 4, 4 / 3), 0.875


def folder(count: int) -> Path:
    """Returns a folder with `count` JPEG files, in one subfolder for each photograph; writes them on first use.

    The folder is in the user's cache (XDG_CACHE_HOME, by default ~/.cache). A file has about 50 KB.

    Raises:
        tfopt.errors.UnsupportedError: If scikit-learn or pillow is missing.
    """
    target = _home() / "tfopt" / f"photos-{_VERSION}-{count}"
    if len(list(target.glob("*/*.jpg"))) != count:  # none yet, or files were lost
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        # Written apart and renamed when whole: a run that was killed leaves no half-filled folder behind.
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            _write(Path(temporary), count)
            os.chmod(temporary, 0o755)
            try:
                os.rename(temporary, target)
            except OSError:  # another process was first
                if not target.is_dir():
                    raise
            else:
                os.mkdir(temporary)  # for the context manager to remove
    return target


def _home() -> Path:
    """The user's cache folder; a temporary one for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return Path(tempfile.gettempdir())


def _write(target: Path, count: int) -> None:
    image = require("PIL.Image")
    sources = require("sklearn.datasets").load_sample_images()
    random = np.random.default_rng(0)
    for number in range(count):
        which = number % len(sources.images)
        name = Path(sources.filenames[which]).stem
        photograph = image.fromarray(sources.images[which])
        width, height = int(random.integers(240, 400)), int(random.integers(200, 330))
        left = int(random.integers(photograph.width - width + 1))
        top = int(random.integers(photograph.height - height + 1))
        cut = photograph.crop((left, top, left + width, top + height))
        if random.random() < 0.5:
            cut = cut.transpose(image.Transpose.FLIP_LEFT_RIGHT)
        scale = random.uniform(1.2, 1.6)
        (target / name).mkdir(exist_ok=True)
        cut.resize((int(width * scale), int(height * scale)), image.Resampling.BICUBIC).save(
            target / name / f"{number:05}.jpg", quality=92
        )


def resized(image: Any, label: Any) -> tuple[Any, Any]:
    """Returns an image of any size, shape (height, width, 3), as uint8 of 224×224, and its label."""
    return tf.cast(tf.image.resize(image, (SIZE, SIZE)), tf.uint8), label


def naive(path: Path, batch_size: int, *, optimised: bool = True) -> tf.data.Dataset:
    """Returns the pipeline of a first script: shuffle, map and batch.

    Args:
        path: A folder of photographs.
        batch_size: Examples in a batch; an incomplete one is dropped.
        optimised: Whether tf.data may make the map parallel and prefetch, as it does by default. Otherwise files are
            read one after the other.
    """
    dataset = names(path)
    dataset = dataset.map(lambda name, label: resized(tf.io.decode_jpeg(tf.io.read_file(name), channels=3), label))
    dataset = dataset.batch(batch_size, drop_remainder=True)
    return dataset if optimised else one_by_one(dataset)


def names(path: Path, times: int = 1) -> tf.data.Dataset:
    """File names of the photographs in a folder with their labels, several times over, shuffled."""
    files = sorted(path.glob("*/*.jpg"))
    classes = sorted({file.parent.name for file in files})
    labels = [classes.index(file.parent.name) for file in files]
    dataset = tf.data.Dataset.from_tensor_slices(([str(file) for file in files], labels)).repeat(times)
    return dataset.shuffle(times * len(files))


def one_by_one(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns the dataset without tf.data's default optimisations."""
    options = tf.data.Options()
    options.experimental_optimization.map_parallelization = False
    options.experimental_optimization.inject_prefetch = False
    options.autotune.enabled = False
    return dataset.with_options(options)


def naive_crops(path: Path, batch_size: int, *, central: bool = False, times: int = 1) -> tf.data.Dataset:
    """Returns a pipeline that decodes each image whole and crops it, one file after the other.

    Args:
        path: A folder of photographs.
        batch_size: Examples in a batch; an incomplete one is dropped.
        central: Crop the middle instead of a random window.
        times: Passes over the photographs in an epoch.
    """
    window = _central_window if central else _random_window

    def example(name: Any, label: Any) -> tuple[Any, Any]:
        image = tf.io.decode_jpeg(tf.io.read_file(name), channels=3)
        return _resized_crop(tf.slice(image, *window(tf.shape(image)))), label

    return one_by_one(names(path, times).map(example).batch(batch_size, drop_remainder=True))


def hand_tuned_crops(path: Path, batch_size: int, *, times: int) -> tf.data.Dataset:
    """Returns random crops as fast as tf.data can: only the window is decoded, in parallel, ahead and in any order."""

    def example(name: Any, label: Any) -> tuple[Any, Any]:
        contents = tf.io.read_file(name)
        begin, size = _random_window(tf.io.extract_jpeg_shape(contents))
        cut = tf.concat([begin[:2], size[:2]], 0)
        return _resized_crop(tf.io.decode_and_crop_jpeg(contents, cut, channels=3)), label

    dataset = names(path, times).map(example, num_parallel_calls=tf.data.AUTOTUNE)
    dataset = dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = False
    return dataset.with_options(options)


def _random_window(shape: Any) -> tuple[Any, Any]:
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape, _WHOLE, area_range=_AREA, aspect_ratio_range=_ASPECT_RATIO, min_object_covered=0.0
    )
    return begin, size


def _central_window(shape: Any) -> tuple[Any, Any]:
    side = tf.cast(tf.round(_FRACTION * tf.cast(tf.reduce_min(shape[:2]), tf.float64)), tf.int32)
    return tf.concat([(shape[:2] - side) // 2, [0]], 0), tf.stack([side, side, -1])


def _resized_crop(image: Any) -> Any:
    return tf.cast(tf.round(tf.image.resize(image, (SIZE, SIZE))), tf.uint8)


def small_net(*, jit_compile: bool | str = "auto") -> keras.Model:
    """Returns a compiled net so small that reading the photographs takes most of the time."""
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((SIZE, SIZE, 3), dtype="uint8"),
            layers.Rescaling(1 / 255),
            layers.Conv2D(8, 8, strides=8, activation="relu"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2, dtype="float32"),
        ]
    )
    net.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=jit_compile,
    )
    return net


def resnet50(*, jit_compile: bool | str = "auto", size: int = SIZE) -> keras.Model:
    """Returns ResNet-50 for images of that height and width, from random weights, under the global dtype policy."""
    images = keras.Input((size, size, 3), dtype="uint8")
    features = keras.layers.Rescaling(1 / 127.5, offset=-1)(images)
    base = keras.applications.ResNet50(
        weights=None, classes=1000, classifier_activation=None, input_tensor=None, input_shape=(size, size, 3)
    )
    logits = keras.layers.Activation("linear", dtype="float32")(base(features))
    net = keras.Model(images, logits)
    net.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return net


def batch(size: int, *, count: int, pixels: int = SIZE) -> tuple[Any, Any]:
    """Returns a batch from `count` files: uint8 images, shape (size, pixels, pixels, 3); labels, shape (size,)."""
    dataset = naive(folder(count), 1).unbatch().repeat().batch(size)
    images, labels = next(iter(dataset))
    return images[:, :pixels, :pixels], tf.cast(labels, tf.int32)


def rows(batch_size: int) -> tuple[Any, Any]:
    """Returns photographs, uint8 of shape (examples, 224, 224, 3), and their labels, for 40 batches."""
    images, labels = (part.numpy() for part in batch(PHOTOGRAPHS, count=PHOTOGRAPHS))
    examples = BATCHES * batch_size
    return np.resize(images, (examples, *images.shape[1:])), np.resize(labels, examples)
