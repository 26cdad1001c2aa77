"""What a dataset yields from a position on, found by reading all that comes before."""

import numpy as np
import tensorflow as tf


def contents(batches):
    """Batches as lists that compare bit for bit."""
    return [[np.asarray(part).tolist() for part in tf.nest.flatten(batch)] for batch in batches]


def three_epochs(dataset):
    """What the next three iterations yield, each followed by one that is begun and not read, as `fit` does."""
    found = []
    for _ in range(3):
        found.append(contents(dataset))
        iter(dataset)
    return found


def read_from(dataset, epoch, batch):
    """The same of a new dataset from a position on."""
    for _ in range(epoch):
        assert contents(dataset)
    first, *later = three_epochs(dataset)
    return [first[batch:], *later]
