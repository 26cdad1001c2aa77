"""One batch of data: what it is taken from."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.model.batches import one_batch


def test_a_whole_data_set_as_one_batch_is_warned_of():
    rows = np.zeros((4097, 2), "float32"), np.zeros(4097)
    with pytest.warns(UserWarning, match="Took 4,097 examples as one batch"):
        one_batch(rows)
    one_batch(tuple(part[:4096] for part in rows))
    one_batch(tf.data.Dataset.from_tensors(rows))
