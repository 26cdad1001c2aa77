"""Ways to pass data to `fit` in several processes: healthy ones, and ones that train on part of it or on some twice.

Each is a function of the model, the worker's number, and a folder of its own.
"""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfopt.callbacks import LocalSteps
from tfopt.pipelines import build_pipeline, images, records

EXAMPLES, BATCH = 64, 16
NUMBERS = np.arange(EXAMPLES)
X = (NUMBERS[:, None] / EXAMPLES).astype("float32")
OFF = tf.data.experimental.AutoShardPolicy.OFF


class Batches(keras.utils.PyDataset):
    """The examples in batches."""

    def __init__(self, numbers=NUMBERS, noise=None, **options):
        super().__init__(**options)
        self.numbers, self.noise = numbers, noise

    def __len__(self):
        return -(-len(self.numbers) // BATCH)

    def __getitem__(self, index):
        numbers = self.numbers[index * BATCH :][:BATCH]
        noise = 0.0 if self.noise is None else self.noise.random((len(numbers), 1)).astype("float32")
        return X[numbers] + noise, numbers


class Noise(Batches):
    """Other inputs and labels in each worker, drawn each time."""

    def __getitem__(self, index):
        x, labels = super().__getitem__(index)
        return x, labels + self.noise.random()


class Fails(keras.callbacks.Callback):
    """Fails in the second step."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            raise KeyError("in a callback")


class Stops(keras.callbacks.Callback):
    """Stops after the second step."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 1


def slices(numbers=NUMBERS):
    """A dataset of the examples, not batched."""
    return tf.data.Dataset.from_tensor_slices((X[numbers], numbers))


def batches(numbers=NUMBERS):
    """A dataset of the examples in batches."""
    return slices(numbers).batch(BATCH)


def with_policy(dataset, policy):
    """The dataset with this policy."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.with_options(options)


def generator(numbers=NUMBERS, passes=1):
    """A Python generator of batches."""
    for _ in range(passes):
        for start in range(0, len(numbers), BATCH):
            yield X[numbers[start : start + BATCH]], numbers[start : start + BATCH]


def random_batches(rank):
    """An endless generator."""
    draw = np.random.default_rng(rank)
    while True:
        numbers = draw.integers(EXAMPLES, size=BATCH)
        yield X[numbers], numbers


def files(folder, sizes=(10, 44, 10)):
    """The examples in files of unlike sizes."""
    numbers, names = iter(NUMBERS), []
    for index, size in enumerate(sizes):
        names.append(f"{folder}/{index}.tfrecord")
        with tf.io.TFRecordWriter(names[-1]) as writer:
            for _ in range(size):
                writer.write(np.int64(next(numbers)).tobytes())
    return names


def parsed(record):
    """An example of a record."""
    number = tf.ensure_shape(tf.io.decode_raw(record, tf.int64), (1,))
    return tf.cast(number, tf.float32) / EXAMPLES, number[0]


def counted_files(names):
    """A dataset of files whose number of examples is asserted."""
    read = tf.data.TFRecordDataset(names).map(parsed)
    return read.apply(tf.data.experimental.assert_cardinality(EXAMPLES)).batch(BATCH)


def fits(data, **options):
    """A case that passes a dataset, arrays or another kind of data, made for the worker's number, to `fit`."""

    def fit(model, rank, folder):
        del folder
        passed = data(rank)
        arrays = dict(zip(("x", "y"), passed, strict=True)) if isinstance(passed, tuple) else {"x": passed}
        sized = {"batch_size": BATCH} if isinstance(passed, tuple) else {"shuffle": False}
        model.fit(**{**arrays, **sized, "epochs": 2, "verbose": 0, **options})

    return fit


def pipeline(source, **options):
    """A case that trains on `build_pipeline`, given a function of the worker's number and its folder."""

    def fit(model, rank, folder):
        made = build_pipeline(source(rank, folder), **{"batch_size": BATCH, **options})
        fits(lambda _: made)(model, rank, folder)

    return fit


def arrays(numbers=NUMBERS):
    """Inputs and labels."""
    return X[numbers], numbers


def generated(numbers=NUMBERS, noise=0.0):
    """A dataset that a Python function makes, with noise of the worker's own on inputs and labels."""
    draw = np.random.default_rng()

    def examples():
        for x, y in zip(*arrays(numbers), strict=True):
            yield x + np.float32(noise * draw.random()), y + noise * draw.random()

    spec = tf.TensorSpec((1,), "float32"), tf.TensorSpec((), "float32")
    made = tf.data.Dataset.from_generator(examples, output_signature=spec)
    return made.apply(tf.data.experimental.assert_cardinality(len(numbers)))


def photos(folder):
    """The numbers as images, each labelled with its number."""
    for number in NUMBERS:
        keras.utils.save_img(f"{folder}/{number}.png", np.full((2, 2, 3), number), scale=False)
    return images(([f"{folder}/{number}.png" for number in NUMBERS], NUMBERS))


def shade(image, label):
    """An example of an image."""
    return tf.cast(image[0, 0, :1], tf.float32) / EXAMPLES, label


def shifted(x, y, seed):
    """An example with noise on its input."""
    return x + tf.random.stateless_uniform((1,), seed), y


def _seeds(model, rank, folder):
    keras.utils.set_random_seed(rank)
    fits(lambda _: (X, NUMBERS))(model, rank, folder)


def _no_seed(model, rank, folder):
    tf.random.set_seed(None)
    fits(lambda _: slices().shuffle(EXAMPLES).batch(BATCH))(model, rank, folder)


def _files(model, rank, folder):
    fits(lambda _: counted_files(files(folder)))(model, rank, folder)


def _own_files(model, rank, folder):
    fits(lambda _: counted_files(files(folder, (22, 20, 22))[rank:][:2]))(model, rank, folder)


def _files_in_local_steps(model, rank, folder):
    fits(lambda _: counted_files(files(folder)), callbacks=[LocalSteps(3)])(model, rank, folder)


def _same_function(model, rank, folder):
    made = tf.distribute.get_strategy().distribute_datasets_from_function(lambda _: slices().batch(8))
    fits(lambda _: made)(model, rank, folder)


# Case → part of what it is refused with.
WRONG = {
    "dataset sharded": (fits(lambda rank: slices().shard(2, rank).batch(BATCH)), "shard(2, 0) in worker 0"),
    "batches sharded": (fits(lambda rank: batches().shard(2, rank)), "shard(2, 0) in worker 0"),
    "taken": (fits(lambda rank: slices().skip(32 * rank).take(32).batch(BATCH)), "skip(0) in worker 0"),
    "arrays sharded": (fits(lambda rank: (X[rank::2], NUMBERS[rank::2])), "other examples in worker 1"),
    "arrays of unlike sizes": (fits(lambda rank: (X[: 60 + rank], NUMBERS[: 60 + rank])), "60 examples in worker 0"),
    "slices sharded": (fits(lambda rank: batches(NUMBERS[rank::2])), "other examples in worker 1"),
    "PyDataset sharded": (fits(lambda rank: Batches(NUMBERS[rank::2])), "other examples in worker 1"),
    "OFF": (fits(lambda rank: with_policy(batches(), OFF)), "the same first batch in workers 0 and 1"),
    "OFF, sharded": (fits(lambda rank: with_policy(slices().shard(2, rank).batch(BATCH), OFF)), "Found: 32"),
    "OFF, shuffled": (
        fits(lambda rank: with_policy(slices().shuffle(64, seed=rank + 1).batch(BATCH), OFF)),
        "Expected 128 examples",
    ),
    "function that ignores its context": (_same_function, "the same first batch in workers 0 and 1"),
    "shuffled with own seeds": (fits(lambda rank: slices().shuffle(64, seed=rank + 1).batch(BATCH)), "shuffle with"),
    "shuffled without a seed": (_no_seed, "shuffle with"),
    "fit's shuffle with own seeds": (_seeds, "fit's shuffle with the seed(0) in worker 0"),
    "PyDataset in threads": (fits(lambda rank: Batches(workers=2)), "workers > 1"),
    "finite generator": (fits(lambda rank: generator(passes=8), epochs=1), "Expected 512 examples"),
    "files of unlike sizes": (_files, "Expected 64 examples"),
    "files of unlike sizes, local steps": (_files_in_local_steps, "Expected 64 examples"),
    "own files": (_own_files, "other examples in worker 1"),
    "other steps": (fits(lambda rank: batches(NUMBERS[: 32 + 32 * rank])), "2 in worker 0, 4 in worker 1"),
    "pipeline, sharded arrays": (pipeline(lambda rank, _: arrays(NUMBERS[rank::2])), "build_pipeline to get the same"),
    "pipeline, sharded dataset": (
        pipeline(lambda rank, _: slices().shard(2, rank)),
        "build_pipeline to get the same source in all workers",
    ),
    "pipeline, unlike sizes": (
        pipeline(lambda rank, _: arrays(NUMBERS[: 62 + rank]), remainder="keep"),
        "62 examples in worker 0, 63 in worker 1",
    ),
    "pipeline, other steps": (
        pipeline(lambda rank, _: arrays(NUMBERS[: 32 + 32 * rank])),
        "pass build_pipeline the same whole source",
    ),
    "pipeline, files in own orders": (
        pipeline(lambda rank, folder: records(files(folder)[:: 1 - 2 * rank]), transform=parsed),
        "other examples in worker 1",
    ),
    "pipeline, shuffled in one worker": (
        lambda model, rank, folder: pipeline(lambda *_: arrays(), shuffle=rank == 0)(model, rank, folder),
        "shuffle(1) in worker 0, shuffle(0) in worker 1",
    ),
    "pipeline of random data": (pipeline(lambda *_: generated(noise=1.0)), "differ when read again"),
}


def _function(model, rank, folder):
    def here(context):
        return slices().shard(context.num_input_pipelines, context.input_pipeline_id).batch(8)

    made = tf.distribute.get_strategy().distribute_datasets_from_function(here)
    fits(lambda _: made)(model, rank, folder)


def _constant(model, rank, folder):
    def here(context):
        return tf.data.Dataset.from_tensors((X[1], NUMBERS[1])).repeat(32).batch(8)

    made = tf.distribute.get_strategy().distribute_datasets_from_function(here)
    fits(lambda _: made)(model, rank, folder)


def _even_files(model, rank, folder):
    names = files(folder, (32, 32))
    fits(lambda _: tf.data.TFRecordDataset(names).map(parsed).shuffle(64, seed=rank + 1).batch(BATCH))(
        model, rank, folder
    )


def _elsewhere(model, rank, folder):
    names = files(folder, (32, 32))  # a folder of this worker's own
    fits(lambda _: counted_files(names))(model, rank, folder)


def _resumed(model, rank, folder):
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    fits(lambda _: batches(), callbacks=[backup])(model, rank, folder)
    again = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    fits(lambda _: batches(), epochs=4, callbacks=[again])(model, rank, folder)


def _seed_zero(model, rank, folder):
    keras.utils.set_random_seed(0)
    fits(lambda _: (X, NUMBERS))(model, rank, folder)


def _fits_again(model, rank, folder):
    with contextlib.suppress(KeyError):
        fits(lambda _: batches(), callbacks=[Fails()])(model, rank, folder)
    fits(lambda _: (X, NUMBERS))(model, rank, folder)
    model.evaluate(batches(), verbose=0)
    model.predict(X, verbose=0)
    model.compile("sgd", "mse", jit_compile=False)
    fits(lambda _: batches(NUMBERS[:57]))(model, rank, folder)


def _compiled(data, **options):
    def fit(model, rank, folder):
        model.compile("sgd", "mse", **{"jit_compile": False, **options})
        fits(data)(model, rank, folder)

    return fit


def _mapped_files(model, rank, folder):
    fits(lambda _: counted_files(files(folder)).map(lambda x, y: (x, y)))(model, rank, folder)


def _by_hand(model, rank, folder):
    model.train_on_batch(X[:BATCH], NUMBERS[:BATCH])
    fits(lambda _: batches())(model, rank, folder)


HEALTHY = {
    "arrays, shuffled": fits(lambda rank: (X, NUMBERS)),
    "arrays, uneven tail, validation": fits(lambda rank: (X, NUMBERS), validation_split=0.1),
    "arrays, rounded otherwise": fits(lambda rank: (X + np.float32(1e-7 * rank), NUMBERS)),
    "dataset": fits(lambda rank: batches()),
    "dataset, uneven tail, validation data": fits(lambda rank: batches(NUMBERS[:57]), validation_data=batches()),
    "batches that never split evenly": fits(lambda rank: slices().batch(15)),
    "full batches": fits(lambda rank: slices().batch(15, drop_remainder=True)),
    "shuffled with a common seed": fits(lambda rank: slices().shuffle(64).batch(BATCH)),
    "batches shuffled with own seeds": fits(lambda rank: batches(NUMBERS[:57]).shuffle(4, seed=rank + 1)),
    "class weights": fits(lambda rank: slices().map(lambda x, y: (x, y % 2)).batch(BATCH), class_weight={0: 1, 1: 2}),
    "sample weights": fits(lambda rank: slices().map(lambda x, y: (x, y, 0.5)).batch(BATCH)),
    "repeated": fits(lambda rank: slices(NUMBERS[:40]).repeat(2).batch(BATCH)),
    "a tiny one repeated": fits(lambda rank: slices(NUMBERS[:8]).repeat(8).batch(BATCH)),
    "endless, steps": fits(lambda rank: slices().repeat().shuffle(64).batch(BATCH), steps_per_epoch=3),
    "sharded, endless, steps": fits(lambda rank: slices().shard(2, rank).repeat().batch(BATCH), steps_per_epoch=3),
    "fewer steps": fits(lambda rank: batches(), steps_per_epoch=2),
    "filtered": fits(lambda rank: slices().filter(lambda x, y: y % 3 > 0).batch(BATCH)),
    "two crops of each image": fits(lambda rank: batches().map(lambda x, y: (tf.repeat(x, 2, 0), tf.repeat(y, 2, 0)))),
    "augmented in each worker": fits(
        lambda rank: slices().map(lambda x, y: (x + tf.random.normal((1,), seed=rank), y)).batch(BATCH)
    ),
    "local steps": fits(lambda rank: batches(NUMBERS[:57]), callbacks=[LocalSteps(3)]),
    "stopped": fits(lambda rank: batches(), callbacks=[Stops()]),
    "PyDataset, shuffled, uneven tail": fits(lambda rank: Batches(NUMBERS[:57]), shuffle=True),
    "PyDataset, augmented": fits(lambda rank: Batches(noise=np.random.default_rng(rank))),
    "PyDataset, labels augmented": fits(lambda rank: Noise(noise=np.random.default_rng(rank))),
    "endless generator": fits(random_batches, steps_per_epoch=3),
    "part of a generator": fits(lambda rank: generator(passes=8), steps_per_epoch=4),
    "dataset of a generator": fits(
        lambda rank: tf.data.Dataset.from_generator(
            generator,
            output_signature=(tf.TensorSpec((None, 1), "float32"), tf.TensorSpec((None,), "int64")),
        )
    ),
    "steps per execution": _compiled(lambda rank: batches(NUMBERS[:57]), steps_per_execution=3),
    "eagerly": _compiled(lambda rank: batches(NUMBERS[:57]), run_eagerly=True),
    "jit": _compiled(lambda rank: batches(NUMBERS[:57]), jit_compile=True),
    "function": _function,
    "constant examples": _constant,
    "files of one size, shuffled": _even_files,
    "files in own folders": _elsewhere,
    "files of unlike sizes, batches mapped": _mapped_files,  # which may change how many there are
    "a seed of zero": _seed_zero,
    "resumed": _resumed,
    "fits, evaluates and predicts again": _fits_again,
    "by hand first": _by_hand,
    "pipeline, uneven tail": pipeline(lambda *_: arrays(NUMBERS[:57]), remainder="keep", seed=3),
    "pipeline, full batches": pipeline(lambda *_: arrays(NUMBERS[:57]), remainder="drop", seed=3),
    "pipeline, shuffled without a seed": pipeline(lambda *_: arrays()),
    "pipeline, not shuffled, augmented": pipeline(lambda *_: arrays(), shuffle=False, augment=shifted),
    "pipeline of records": pipeline(
        lambda _, folder: records(files(folder)), transform=parsed, remainder="keep", seed=3
    ),
    "pipeline of images": pipeline(lambda _, folder: photos(folder), transform=shade),
    "pipeline of a dataset": pipeline(lambda *_: slices()),
    "pipeline of a generator, not shuffled": pipeline(lambda *_: generated(), shuffle=False),
}

# Of the slow tests: each thing that is looked at in wrong data, each kind of healthy data, each way to train.
FEW = [
    "dataset sharded",
    "OFF",
    "files of unlike sizes",
    "arrays, shuffled",
    "pipeline, uneven tail",
    "batches sharded",
    "taken",
    "arrays of unlike sizes",
    "PyDataset sharded",
    "OFF, sharded",
    "OFF, shuffled",
    "function that ignores its context",
    "shuffled with own seeds",
    "fit's shuffle with own seeds",
    "PyDataset in threads",
    "finite generator",
    "files of unlike sizes, local steps",
    "own files",
    "other steps",
    "pipeline, sharded arrays",
    "pipeline, sharded dataset",
    "pipeline, unlike sizes",
    "pipeline, files in own orders",
    "pipeline, shuffled in one worker",
    "arrays, uneven tail, validation",
    "shuffled with a common seed",
    "sharded, endless, steps",
    "filtered",
    "two crops of each image",
    "local steps",
    "stopped",
    "PyDataset, shuffled, uneven tail",
    "part of a generator",
    "dataset of a generator",
    "steps per execution",
    "constant examples",
    "files of unlike sizes, batches mapped",
    "fits, evaluates and predicts again",
    "pipeline of records",
    "pipeline of images",
]
# Trained without the check too: wrong ones, to see what is wrong with them, and healthy ones, for equal weights.
SHOWN = ["dataset sharded", "OFF", "shuffled with own seeds", "files of unlike sizes", "pipeline, sharded arrays"]
COMPARED = [
    "arrays, shuffled",
    "arrays, uneven tail, validation",
    "dataset, uneven tail, validation data",
    "shuffled with a common seed",
    "class weights",
    "endless, steps",
    "local steps",
    "filtered",
    "PyDataset, shuffled, uneven tail",
    "dataset of a generator",
    "steps per execution",
    "eagerly",
    "jit",
    "function",
    "files of one size, shuffled",
    "resumed",
    "fits, evaluates and predicts again",
    "pipeline, uneven tail",
    "pipeline of records",
    "pipeline of a generator, not shuffled",
]
