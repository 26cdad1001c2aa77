"""Cases of Keras' own data sets: batches that Python makes, small ones and large ones."""

from functools import partial

import keras
import numpy as np

from pipeline_cases import HAND, TFOPT, Case, Way, at_least, no_way
from pipeline_cases.of_arrays import equal, floats, noise
from tfopt.internals.training import PyDatasetAdapter
from tfopt.pipelines import build_pipeline

_WORKERS = 2


class Batches(keras.utils.PyDataset):
    """Batches of rows in arrays, in another order in each epoch."""

    def __init__(self, data, batch, **options):
        super().__init__(**options)
        self.data, self.batch, self.random = data, batch, np.random.default_rng(0)
        self.on_epoch_end()

    def __len__(self):
        """Returns the number of full batches."""
        return len(self.order) // self.batch

    def __getitem__(self, index):
        """Returns a batch."""
        rows = self.order[index * self.batch : (index + 1) * self.batch]
        return tuple(part[rows] for part in self.data)

    def on_epoch_end(self):
        """Draws another order."""
        self.order = self.random.permutation(len(self.data[0]))


class AsFitDoes:
    """The batches of a PyDataset as `fit` feeds them without tfopt."""

    def __init__(self, data):
        self.adapter = PyDatasetAdapter(data, shuffle=False)

    def __iter__(self):
        """Begins an epoch, and ends it."""
        self.adapter.on_epoch_begin()
        yield from self.adapter.get_tf_dataset().take(self.adapter.num_batches)
        self.adapter.on_epoch_end()


def batches(make, rows, size, what, folder, scale):
    """A PyDataset with two workers."""
    data, batch = make(getattr(scale, rows)), size(scale)
    workers = {"workers": _WORKERS, "max_queue_size": 10}
    return Case(
        question=f"A PyDataset of {len(data[0]):,} rows of {data[0][0].nbytes:,} bytes, two workers",
        goal=at_least(1.0),
        ways=[
            Way(
                TFOPT,
                "build_pipeline(dataset)",
                lambda: build_pipeline(Batches(data, batch, **workers), shuffle=False, device=None),
            ),
            Way(HAND, "as `fit` feeds it", lambda: AsFitDoes(Batches(data, batch, **workers))),
            no_way("Grain", "it reads no PyDataset"),
        ],
        examples=len(data[0]),
        batch=batch,
        right=equal(data[0]),
    )


CASES = {
    "pydataset, small batches": partial(batches, floats, "small_rows", lambda scale: scale.batch, "small"),
    "pydataset, large batches": partial(
        batches, lambda rows: noise(rows, 224, 224, 3), "large_rows", lambda scale: scale.batch // 4, "large"
    ),
}
