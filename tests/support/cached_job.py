"""A pipeline with a cache on disk, for tests that run it in processes of their own.

`python cached_job.py FOLDER EPOCHS` prints "begun", and after each epoch whether it had every example once, in order.
In the environment: PAUSE, seconds to compute an example; FILE_LIMIT, bytes that a file may have.
"""

import logging
import os
import resource
import sys
import time

import numpy as np
import tensorflow as tf

from tfopt.pipelines import plan_pipeline
from tfopt.pipelines.stages import example_stages

COUNT = 300
BATCH = 10
ROW_BYTES = 64 * 8
example_stages._AT_ONCE_SECONDS = 0.0  # a batch is written by itself, however quick its examples are
EXPECTED = [2 * row for row in range(COUNT)]


def slowly(row):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return 2 * row


def twice(row):
    return tf.ensure_shape(tf.numpy_function(slowly, [row], tf.int64), ()) * tf.ones((64,), tf.int64)


def plan(folder, first=0):
    rows = np.arange(first, first + COUNT, dtype=np.int64)
    options = {"cache": os.fspath(folder), "cache_key": "twice"}  # which stands for the Python code
    return plan_pipeline(rows, batch_size=BATCH, training=False, transform=twice, **options)


def numbers(dataset):
    """What one pass over the dataset gives."""
    return [int(row[0]) for batch in dataset for row in batch.numpy()]


def main():
    logging.basicConfig(level=logging.WARNING)
    if "FILE_LIMIT" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(os.environ["FILE_LIMIT"]),) * 2)
    dataset = plan(sys.argv[1]).build()
    print("begun", flush=True)
    for _ in range(int(sys.argv[2])):
        print("right" if numbers(dataset) == EXPECTED else "wrong", flush=True)


if __name__ == "__main__":
    main()
