"""Cases of rows in memory: large ones, small ones, and with a random function of each."""

from functools import partial

import numpy as np
import tensorflow as tf

from pipeline_cases import HAND, TFOPT, Case, Way, at_least, no_way
from pipeline_cases.by_grain import Rows, by_grain, flip, flip_batch
from tfopt.pipelines import build_pipeline, per_batch

AUTOTUNE = tf.data.AUTOTUNE


def noise(rows, *shape):
    """Rows of noise, uint8, and their numbers."""
    return np.random.default_rng(0).integers(256, size=(rows, *shape), dtype=np.uint8), np.arange(rows)


def floats(rows, columns=16):
    """Rows of float32 noise, 64 bytes each, and their numbers."""
    return np.random.default_rng(0).random((rows, columns), "float32"), np.arange(rows)


def equal(inputs):
    """Judges whether a batch holds the rows that its labels name."""
    return lambda batch, labels: np.array_equal(batch, inputs[labels])


def equal_or_mirrored(inputs):
    """Judges whether each image of a batch is the one that its label names, or that one mirrored."""

    def right(batch, labels):
        own = inputs[labels]
        return all(np.array_equal(a, b) or np.array_equal(a, b[:, ::-1]) for a, b in zip(batch, own, strict=True))

    return right


def fused(dataset, batch):
    """Lets tf.data fuse a map with the batch that follows."""
    options = tf.data.Options()
    options.experimental_optimization.map_and_batch_fusion = True
    options.experimental_optimization.noop_elimination = False
    return dataset.batch(batch, drop_remainder=True).prefetch(AUTOTUNE).with_options(options)


def permuted(data, batch, function=None):
    """By hand: a permutation of all numbers an epoch, and one gather a batch."""
    count = len(data[0])
    held = [tf.constant(part) for part in data]

    def order(_):
        numbers = tf.random.shuffle(tf.range(count, dtype=tf.int64))
        return tf.data.Dataset.from_tensor_slices(tf.reshape(numbers[: count // batch * batch], (-1, batch)))

    def gathered(numbers):
        rows = tuple(tf.gather(part, numbers) for part in held)
        return rows if function is None else function(*rows)

    dataset = tf.data.Dataset.range(1).flat_map(order)
    return dataset.map(gathered, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)


def tfopt(data, batch, **options):
    """Through tfopt, on the host; the last batch, if it is not full, is dropped by all."""
    options = {"cache": None} | options
    return build_pipeline(data, batch_size=batch, remainder="drop", device=None, **options)


def large_rows(folder, scale):
    """Images in arrays."""
    data, batch = noise(scale.large_rows, 224, 224, 3), scale.batch // 4

    def by_rows():
        held = [tf.constant(part) for part in data]
        dataset = tf.data.Dataset.range(scale.large_rows).shuffle(scale.large_rows)
        return fused(dataset.map(lambda at: tuple(part[at] for part in held), num_parallel_calls=AUTOTUNE), batch)

    def by_slices():
        dataset = tf.data.Dataset.from_tensor_slices(data).shuffle(scale.large_rows)
        return dataset.batch(batch, drop_remainder=True, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)

    return Case(
        question=f"{scale.large_rows:,} images of 224×224 in arrays, shuffled",
        goal=at_least(0.95),
        ways=[
            Way(TFOPT, "build_pipeline((images, labels))", lambda: tfopt(data, batch)),
            Way(HAND, "shuffled numbers, then map and batch, fused: its memory is pinned", by_rows),
            Way("by hand, slices", "from_tensor_slices, shuffle, batch: pageable memory", by_slices),
            Way("by hand, gather", "one gather a batch: pageable memory", lambda: permuted(data, batch)),
            by_grain("source, shuffle, batch", lambda: Rows(*data), batch),
        ],
        examples=scale.large_rows,
        batch=batch,
        right=equal(data[0]),
    )


def inverted(image, label):
    """A cheap deterministic function."""
    return 255 - image, label


def large_rows_cached(folder, scale):
    """The same behind a cache in memory."""
    data, batch = noise(scale.large_rows, 224, 224, 3), scale.batch // 4

    def examples():
        dataset = tf.data.Dataset.from_tensor_slices(data).map(inverted, num_parallel_calls=AUTOTUNE)
        return dataset.cache().shuffle(scale.large_rows)

    def by_rows():
        return fused(examples().map(lambda *example: example, num_parallel_calls=AUTOTUNE), batch)

    def plain():
        return examples().batch(batch, drop_remainder=True, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)

    return Case(
        question="The same behind a cache in memory, later epochs",
        goal=at_least(0.95),
        ways=[
            Way(TFOPT, 'transform=…, cache="memory"', lambda: tfopt(data, batch, transform=inverted, cache="memory")),
            Way(HAND, "map, cache, shuffle, then map and batch, fused: its memory is pinned", by_rows),
            Way("by hand, batch", "map, cache, shuffle, batch: pageable memory", plain),
            no_way("Grain", "it has no cache that can be shuffled"),
        ],
        examples=scale.large_rows,
        batch=batch,
        right=equal(255 - data[0]),
    )


def small_rows(folder, scale):
    """Rows of 64 bytes."""
    data, batch = floats(scale.small_rows), scale.batch
    return Case(
        question=f"{scale.small_rows:,} rows of 16 float32 in arrays, shuffled",
        goal=at_least(0.95),
        ways=[
            Way(TFOPT, "build_pipeline((x, y))", lambda: tfopt(data, batch)),
            Way(HAND, "tf.random.shuffle of all numbers, one gather a batch", lambda: permuted(data, batch)),
            by_grain("source, shuffle, batch", lambda: Rows(*data), batch),
        ],
        examples=scale.small_rows,
        batch=batch,
        right=equal(data[0]),
    )


def mirrored(image, label):
    """Mirrors every other image."""
    return tf.image.random_flip_left_right(image), label


def mirrored_by_seed(image, label, seed):
    """Mirrors every other image, by a stateless operation."""
    return tf.image.stateless_random_flip_left_right(image, seed), label


def random_seed():
    """A seed for stateless operations, drawn in a map."""
    return tf.random.uniform((2,), maxval=2**31 - 1, dtype=tf.int32)


def mirrored_batch(images, labels, seed):
    """Mirrors every other image of a batch."""
    chosen = tf.random.stateless_uniform((tf.shape(images)[0], 1, 1, 1), seed) < 0.5
    return tf.where(chosen, tf.reverse(images, [2]), images), labels


def augment(seeds, folder, scale):
    """A function of each element, with a seed for each or without."""
    data, batch = noise(scale.images, 32, 32, 3), scale.batch

    def stock():
        def seeded(image, label):
            return mirrored_by_seed(image, label, random_seed())

        rows = tf.data.Dataset.from_tensor_slices(data).shuffle(scale.images)
        return fused(rows.map(seeded if seeds else mirrored, num_parallel_calls=AUTOTUNE), batch)

    function = mirrored_by_seed if seeds else mirrored
    question = "The same by a stateless operation, a seed for each"
    return Case(
        question=question if seeds else f"{scale.images:,} images of 32×32 in arrays, each mirrored at random",
        goal=at_least(1.0),
        ways=[
            Way(TFOPT, "build_pipeline, augment=…", lambda: tfopt(data, batch, augment=function)),
            Way(HAND, "from_tensor_slices, shuffle, map and batch, fused", stock),
            by_grain("shuffle, random_map, batch", lambda: Rows(*data), batch, random_function=flip),
        ],
        examples=scale.images,
        batch=batch,
        right=equal_or_mirrored(data[0]),
    )


def augment_batches(folder, scale):
    """The same as a function of batches."""
    data, batch = noise(scale.images, 32, 32, 3), scale.batch

    def by_batches():
        def seeded(images, labels):
            return mirrored_batch(images, labels, random_seed())

        return permuted(data, batch, seeded)

    return Case(
        question="The same by a function of batches",
        goal=at_least(0.95),
        ways=[
            Way(TFOPT, "augment=per_batch(…)", lambda: tfopt(data, batch, augment=per_batch(mirrored_batch))),
            Way(HAND, "permutation and one gather a batch, mirrored in the same map", by_batches),
            by_grain("shuffle, batch, random_map", lambda: Rows(*data), batch, batch_function=flip_batch),
        ],
        examples=scale.images,
        batch=batch,
        right=equal_or_mirrored(data[0]),
    )


CASES = {
    "large rows": large_rows,
    "large rows, cached": large_rows_cached,
    "small rows": small_rows,
    "augment": partial(augment, False),
    "augment, seeds": partial(augment, True),
    "augment, batches": augment_batches,
}
