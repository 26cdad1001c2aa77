"""Input pipelines that deliver something other than what was asked for."""

import os
import signal
import subprocess
import sys
import warnings

import keras
import numpy as np
import tensorflow as tf

import tfopt
from defect_cases import Case, RefusedError, forked
from tfopt.pipelines import build_pipeline, records, write_records

ROWS = np.arange(50, dtype=np.int64)


def add_one(row):
    """The transform of the first run."""
    return row + 1


def times_ten(row):
    """The transform of the second run."""
    return row * 10


def cached(with_tfopt, folder, transform, **options):
    """The rows, transformed and cached in a folder."""
    if with_tfopt:
        options = {"training": False, "transform": transform, "cache": folder} | options
        return build_pipeline(ROWS, batch_size=5, **options)
    return tf.data.Dataset.from_tensor_slices(ROWS).map(transform).cache(os.fspath(folder / "cache")).batch(5)


def rows(dataset):
    """What a pass over a dataset of batches delivers."""
    return [int(row) for batch in dataset for row in batch]


def other_elements(with_tfopt, folder):
    """Wrong elements from a folder in which another pipeline's are cached."""
    rows(cached(with_tfopt, folder, add_one))
    return int(np.sum(rows(cached(with_tfopt, folder, times_ten)) != ROWS * 10))


def blocked(with_tfopt, folder):
    """How many of three runs fail after one that was killed while it wrote the cache."""
    killed = forked(read_or_die, with_tfopt, folder, True)
    assert killed == -signal.SIGKILL
    return sum(forked(read_or_die, with_tfopt, folder, False) != 0 for _ in range(3))


def read_or_die(with_tfopt, folder, die):
    """Reads through what is cached; if asked to, is killed in the middle."""
    for step, _ in enumerate(cached(with_tfopt, folder, add_one)):
        if die and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def orders(with_tfopt, folder):
    """Orders in three epochs of data that are shuffled and cached."""
    if with_tfopt:
        dataset = cached(with_tfopt, folder, add_one, training=True, shuffle=True)
    else:
        dataset = tf.data.Dataset.from_tensor_slices(ROWS).shuffle(50).map(add_one).cache().batch(5)
    return len({tuple(rows(dataset)) for _ in range(3)})


RECORDS = [b"%02d" % number * 10 for number in range(30)]


def shards(with_tfopt, folder):
    """Three files of ten records."""
    if with_tfopt:
        write_records(tf.data.Dataset.from_tensor_slices(RECORDS), folder / "data", shards=3, shuffle_seed=None)
        return sorted((folder / "data").glob("*.tfrecord"))
    paths = [folder / f"{shard}.tfrecord" for shard in range(3)]
    for shard, path in enumerate(paths):
        with tf.io.TFRecordWriter(os.fspath(path)) as writer:
            for record in RECORDS[shard * 10 : shard * 10 + 10]:
                writer.write(record)
    return paths


def read(paths, *, skip=False):
    """How many records tf.data reads."""
    dataset = tf.data.TFRecordDataset([os.fspath(path) for path in paths])
    if skip:
        dataset = dataset.ignore_errors()
    return sum(1 for _ in dataset)


def cut_files(with_tfopt, folder):
    """Records read of 30, in three files, one of which is empty and another cut after its fourth record."""
    paths = shards(with_tfopt, folder)
    size = paths[1].stat().st_size // 10
    os.truncate(paths[0], 0)
    os.truncate(paths[1], 4 * size)
    if with_tfopt:
        return sum(1 for _ in records(folder / "data").dataset())
    return read(paths)


def beside_a_bad_one(with_tfopt, folder):
    """Records kept of 30, of which one is damaged, the second of its file."""
    paths = shards(with_tfopt, folder)
    size = paths[1].stat().st_size // 10
    with paths[1].open("r+b") as file:
        file.seek(size + 20)
        file.write(b"?")
    if not with_tfopt:
        return read(paths, skip=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = records(folder / "data", on_bad_record="skip")
    return sum(1 for _ in source.dataset())


class Recording(keras.Sequential):
    """Notes how many examples of a batch each device gets."""

    def train_step(self, data):
        tf.numpy_function(lambda x: self.sizes.append(len(x)), [data[0]], [])
        return super().train_step(data)


def examples_per_device(with_tfopt, folder):
    """Examples that a device gets of a batch of 16, on two devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if with_tfopt:
        scope = tfopt.distribute.strategy("auto").scope()
    else:
        devices = [device.name for device in tf.config.list_logical_devices("CPU")]
        scope = keras.distribution.DataParallel(devices=devices).scope()
    with scope:
        model = Recording([keras.Input((1,)), keras.layers.Dense(1)])
        model.sizes = []
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(np.ones((16, 1)), np.ones((16, 1)), batch_size=16, verbose=0)
    return max(model.sizes)


def copied_to(with_tfopt, folder):
    """The device that holds batches copied to a GPU that does not exist."""
    if with_tfopt:
        try:
            dataset = build_pipeline(ROWS, batch_size=5, device="/gpu:0")
        except ValueError as error:
            raise RefusedError(str(error)) from error
    else:
        dataset = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
        dataset = dataset.apply(tf.data.experimental.prefetch_to_device("/gpu:0"))
    return tf.DeviceSpec.from_string(next(iter(dataset)).device).device_type


def delivered(with_tfopt, folder):
    """How often a service of two workers delivers each element, without sharding."""
    if with_tfopt:
        command = [sys.executable, "-m", "tfopt.pipelines.serve", "--port", "0", "--workers", "2"]
        served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            address = served.stdout.readline().split()[-1]
            return len(rows(build_pipeline(ROWS, batch_size=5, service=address))) / len(ROWS)
        finally:
            served.terminate()
            served.communicate(timeout=30)
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer()
    config = service.WorkerConfig(dispatcher_address=dispatcher.target.split("://")[1])
    workers = [service.WorkerServer(config) for _ in range(2)]
    off = service.ShardingPolicy.OFF
    dataset = tf.data.Dataset.from_tensor_slices(ROWS).batch(5)
    dataset = dataset.apply(service.distribute(off, dispatcher.target))
    found = len(rows(dataset)) / len(ROWS)
    del workers
    return found


CASES = (
    Case("D11", "wrong elements of 50, cached under the path of another pipeline", 0, other_elements),
    Case("D11", "runs of 3 that fail after one was killed", 0, blocked),
    Case("D11", "orders in 3 epochs, shuffled and cached", 3, orders),
    Case("D12", "records read of 30, 6 of them cut off and 10 in a file now empty", "an error", cut_files),
    Case("D12", "records kept of 30, one of them damaged", 29, beside_a_bad_one),
    Case("D13", "examples for each of 2 devices, of a batch of 16", 8, examples_per_device),
    Case("D13", "device of a batch copied to `/gpu:0` without a GPU", "an error", copied_to),
    Case("D17", "times that each element is delivered by 2 workers", 1, delivered),
)
