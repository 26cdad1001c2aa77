"""Grain, Google's loader for JAX: the same work, read by its threads, which the two cores keep busy."""

import math
from importlib import metadata

import numpy as np

from pipeline_cases import GRAIN, Way, no_way

try:
    import grain
    from array_record.python import array_record_module
except ImportError:
    grain = None

_MISSING = "not installed: pip install -r benchmarks/peers/requirements.txt"
_CHUNK = 1000  # random numbers


class Rows:
    """Arrays as a source of examples."""

    def __init__(self, inputs, labels):
        self._inputs, self._labels = inputs, labels

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        return self._inputs[index], self._labels[index]


def by_grain(note, source, batch, *, function=None, random_function=None, batch_function=None):
    """The way over a source: shuffled, mapped, batched and read ahead by threads. `source` is a function."""
    if grain is None:
        return no_way(GRAIN, _MISSING)

    def make():
        dataset = grain.MapDataset.source(source()).seed(0).shuffle()
        if function is not None:
            dataset = dataset.map(function)
        if random_function is not None:
            dataset = dataset.random_map(random_function)
        dataset = dataset.batch(batch, drop_remainder=True)
        if batch_function is not None:
            dataset = dataset.random_map(batch_function)
        return dataset.to_iter_dataset()

    return Way(GRAIN, f"grain {version()}, MapDataset: {note}", make)


def version():
    """Grain's, or None."""
    return None if grain is None else metadata.version("grain")


def flip(example, random):
    """Mirrors every other image."""
    image, label = example
    return (image[:, ::-1] if random.random() < 0.5 else image), label


def flip_batch(batch, random):
    """Mirrors every other image of a batch."""
    images, labels = batch
    mirrored = random.random((len(images), 1, 1, 1)) < 0.5
    return np.where(mirrored, images[:, :, ::-1], images), labels


def write(path, records):
    """Writes an ArrayRecord file, in which every record can be read by itself; does nothing without Grain."""
    if grain is not None:
        writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    return path


def of_records(path):
    """Returns a function that returns the source of such a file."""
    return lambda: grain.sources.ArrayRecordDataSource([str(path)])


def window(width, height, random):
    """A random window, as torchvision's RandomResizedCrop draws it: (left, top, right, bottom)."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = random.integers(width - wide + 1), random.integers(height - high + 1)
            return left, top, left + wide, top + high
    return 0, 0, width, height
