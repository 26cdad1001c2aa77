import numpy as np
import pytest


@pytest.fixture(scope="session")
def prepare_tfds():
    """Prepares a small data set of tensorflow-datasets in a folder; returns its builder.

    30 examples for training, numbered from 0, and 10 for testing, from 100: the image has that shade, the label is
    whether it is odd.
    """
    import tensorflow_datasets as tfds

    def examples(first, last):
        for number in range(first, last):
            yield number, {"image": np.full((4, 5, 3), number, np.uint8), "label": number % 2, "number": number}

    def info(builder):
        features = {
            "image": tfds.features.Image(shape=(4, 5, 3)),
            "label": tfds.features.ClassLabel(names=["even", "odd"]),
            "number": np.int64,
        }
        return tfds.core.DatasetInfo(
            builder=builder,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("image", "label") if builder.supervised else None,
        )

    def prepare(folder, name="shades", *, supervised=True, shards=3):
        members = {
            "VERSION": tfds.core.Version("1.0.0"),
            "name": name,
            "supervised": supervised,
            "_info": info,
            "_split_generators": lambda *_: {"train": examples(0, 30), "test": examples(100, 110)},
            "_generate_examples": examples,
        }
        with tfds.core.registered.skip_registration():
            builder = type(name.title(), (tfds.core.GeneratorBasedBuilder,), members)(data_dir=folder)
        config = tfds.download.DownloadConfig(num_shards=shards, try_download_gcs=False)
        builder.download_and_prepare(download_config=config)
        return builder

    return prepare
