"""The numbers 0 to 102 in a source of each kind, to be divided among processes."""

from pathlib import Path
from unittest import mock

import h5py
import keras
import numpy as np
import tensorflow as tf
from PIL import Image

from tfopt.pipelines import arrays, files, hdf5, images, images_with_masks, npy, records, table, tfds, write_records
from tfopt.pipelines.tables import table as table_module

COUNT = 103
ALL = list(range(COUNT))
FEATURES = {"number": tf.io.FixedLenFeature((), tf.int64)}


def write_files(folder, sizes, padding=b""):
    """Writes numbers from zero on as records of files of these sizes."""
    numbers = iter(range(sum(sizes)))
    for file, size in enumerate(sizes):
        with tf.io.TFRecordWriter(f"{folder}/{file}.tfrecord") as writer:
            for _ in range(size):
                number = tf.train.Feature(int64_list=tf.train.Int64List(value=[next(numbers)]))
                more = tf.train.Feature(bytes_list=tf.train.BytesList(value=[padding]))
                features = tf.train.Features(feature={"number": number, "padding": more})
                writer.write(tf.train.Example(features=features).SerializeToString())


def _images(folder):
    for number in ALL:
        place = folder / "ab"[number > 50]
        place.mkdir(exist_ok=True)
        keras.utils.save_img(place / f"{number:03}.png", np.full((2, 2, 3), number), scale=False)


def _masks(folder):
    _images(folder)
    for path in folder.glob("*/*.png"):
        Image.open(path).convert("L").save(path.with_suffix(".mask"), "PNG")


def _hdf5(folder):
    with h5py.File(folder / "rows.h5", "w") as file:
        file["rows"] = np.arange(COUNT)


def _parquet(folder):
    import pyarrow
    import pyarrow.parquet

    for file, (first, last) in enumerate([(0, 7), (7, 60), (60, COUNT)]):
        rows = pyarrow.table({"number": np.arange(first, last), "text": [str(each) for each in range(first, last)]})
        pyarrow.parquet.write_table(rows, folder / f"{file}.parquet", row_group_size=11)


def _by_row_group(folder):
    with mock.patch.multiple(table_module, _HELD_BYTES=0, _BLOCK_BYTES=1, _MIXED_BLOCKS=4):
        return table(folder)


def _tfds(folder):
    import tensorflow_datasets

    def info(builder):
        features = tensorflow_datasets.features.FeaturesDict({"number": np.int64})
        return tensorflow_datasets.core.DatasetInfo(builder=builder, features=features)

    members = {
        "VERSION": tensorflow_datasets.core.Version("1.0.0"),
        "name": "numbers",
        "_info": info,
        "_split_generators": lambda *_: {"train": ((number, {"number": number}) for number in ALL)},
        "_generate_examples": None,
    }
    with tensorflow_datasets.core.registered.skip_registration():
        builder = type("Numbers", (tensorflow_datasets.core.GeneratorBasedBuilder,), members)(data_dir=folder)
    config = tensorflow_datasets.download.DownloadConfig(num_shards=3, try_download_gcs=False)
    builder.download_and_prepare(download_config=config)


def _generated(folder):
    del folder
    made = tf.data.Dataset.from_generator(lambda: iter(ALL), output_signature=tf.TensorSpec((), tf.int64))
    return made.apply(tf.data.experimental.assert_cardinality(COUNT))


def _nothing(folder):
    """Writes no files."""


# Name → what writes its files into a folder, what makes the source of them, and a transform to the number.
_KINDS = {
    "arrays": (_nothing, lambda folder: arrays(np.arange(COUNT)), None),
    "records": (
        lambda folder: write_files(folder, (7, 60, 36)),
        lambda folder: records(f"{folder}/*", features=FEATURES),
        lambda parsed: parsed["number"],
    ),
    "images": (
        _images,
        lambda folder: images((sorted(folder.glob("*/*.png"), key=lambda path: path.name), ALL)),
        lambda image, label: label,
    ),
    "folders of images": (_images, images, lambda image, label: tf.cast(image[0, 0, 0], tf.int64)),
    "images with masks": (
        _masks,
        lambda folder: images_with_masks((sorted(folder.glob("*/*.png")), sorted(folder.glob("*/*.mask")))),
        lambda image, mask: (tf.cast(image[0, 0, 0], tf.int64) + tf.cast(mask[1, 1, 0], tf.int64)) // 2,
    ),
    "files": (
        lambda folder: [(folder / f"{number:03}").write_text(str(number)) for number in ALL],
        lambda folder: files(sorted(folder.iterdir())),
        lambda contents, name: tf.strings.to_number(contents, tf.int64),
    ),
    "npy": (
        lambda folder: np.save(folder / "rows.npy", np.arange(COUNT)),
        lambda folder: npy(folder / "rows.npy"),
        None,
    ),
    "hdf5": (_hdf5, lambda folder: hdf5(folder / "rows.h5", "rows"), None),
    "table": (_parquet, table, lambda columns: columns["number"]),
    "table, by row group": (_parquet, _by_row_group, lambda columns: columns["number"]),
    "generator": (_nothing, _generated, None),
    "tf.data": (_nothing, lambda folder: tf.data.Dataset.range(COUNT), None),
    "large records": (  # which are read one by one
        lambda folder: write_files(folder, (7, 60, 36), bytes(2**15)),
        lambda folder: records(f"{folder}/*", features=FEATURES),
        lambda parsed: parsed["number"],
    ),
    "compressed records": (
        lambda folder: write_records(
            np.arange(COUNT), folder / "written", shards=3, compression="GZIP", shuffle_seed=None
        ),
        lambda folder: records(folder / "written"),
        None,
    ),
    "tensorflow-datasets": (
        _tfds,
        lambda folder: tfds("numbers", data_dir=folder),
        lambda features: features["number"],
    ),
}
NAMES = list(_KINDS)


def source(folder, name):
    """Returns a source and the transform to its numbers; writes its files if they are not there."""
    write, make, transform = _KINDS[name]
    own = Path(folder) / name
    if not own.exists():
        own.mkdir()
        write(own)
    return make(own), transform
