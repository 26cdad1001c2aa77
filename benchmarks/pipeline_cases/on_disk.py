"""Cases of the cache on disk: small and large rows, in later epochs and in the first, which writes it."""

import itertools
import shutil
from functools import partial

import tensorflow as tf

from pipeline_cases import HAND, TFOPT, Case, Way, at_least, at_most, no_way
from pipeline_cases.of_arrays import AUTOTUNE, equal, floats, inverted, noise, tfopt


def doubled(row, label):
    """A cheap deterministic function."""
    return 2 * row, label


def small(scale):
    """Rows of 64 bytes."""
    data = floats(scale.records)
    return data, doubled, scale.batch, equal(2 * data[0]), "rows of 64 bytes"


def large(scale):
    """Rows of 150 KB."""
    data = noise(scale.cached_rows, 224, 224, 3)
    return data, inverted, scale.batch // 8, equal(255 - data[0]), "rows of 150 KB"


def cache(kind, first, folder, scale):
    """tfopt's cache on disk beside stock `cache(file)`."""
    data, function, batch, right, rows = kind(scale)
    count, numbers = len(data[0]), itertools.count()

    def where(name):
        """A new folder; those of earlier turns are removed."""
        for earlier in folder.glob(f"{name}-*"):
            shutil.rmtree(earlier)
        place = folder / f"{name}-{next(numbers)}"
        place.mkdir()
        return place

    def stock():
        place = where("stock")
        dataset = tf.data.Dataset.from_tensor_slices(data).map(function, num_parallel_calls=AUTOTUNE)
        dataset = dataset.cache(str(place / "cache")).shuffle(count)
        return dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE)

    epochs = "the first epoch, which writes it" if first else "later epochs"
    return Case(
        question=f"A cache on disk of {count:,} {rows}, {epochs}",
        timed="first epoch" if first else "epoch",
        goal=at_most(1.3) if first else at_least(1.0),
        ways=[
            Way(
                TFOPT, "transform=…, cache=folder", lambda: tfopt(data, batch, transform=function, cache=where("tfopt"))
            ),
            Way(HAND, "map, cache(file), shuffle, batch", stock),
            no_way("Grain", "it has no cache on disk"),
        ],
        examples=count,
        batch=batch,
        right=right,
    )


CASES = {
    "disk cache, small rows": partial(cache, small, False),
    "disk cache, large rows": partial(cache, large, False),
    "disk cache, small rows, first epoch": partial(cache, small, True),
    "disk cache, large rows, first epoch": partial(cache, large, True),
}
