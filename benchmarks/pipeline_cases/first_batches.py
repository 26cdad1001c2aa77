"""Cases of the first batch: what a training waits for before its first step."""

import tensorflow as tf

from pipeline_cases import HAND, TFOPT, Case, Way, at_most, no_way
from pipeline_cases.by_grain import Rows, by_grain
from pipeline_cases.of_arrays import AUTOTUNE, equal, floats, permuted, tfopt
from pipeline_cases.of_images import SIZE, by_hand, by_pil, photo_files
from pipeline_cases.of_records import FEATURES, grains_way, parsed_in_batches, serialised, write_plain
from tfopt.pipelines import CentralCrop, RandomCrop, images, plan_pipeline, records

BUFFER = 10_000  # of TensorFlow's own guides
_LATER = 4  # batches in the buffer behind a cache
GOAL = at_most(1.5)


def jpeg(folder, scale):
    """JPEG files without a cache."""
    files, batch = photo_files(scale), scale.photo_batch
    return Case(
        question="First batch of JPEG files, cropped at random",
        timed="first batch",
        goal=GOAL,
        ways=[
            Way(TFOPT, "images(…), crop=RandomCrop(224)", lambda: tfopt(images(files), batch, crop=RandomCrop(SIZE))),
            Way(HAND, "shuffled paths, map, batch", lambda: by_hand(*files, batch)),
            by_grain("Pillow, random_map, batch", lambda: Rows(*files), batch, random_function=by_pil),
        ],
        examples=len(files[0]),
        batch=batch,
    )


def from_the_middle(folder, scale):
    """JPEG files from the middle of an epoch on."""
    (paths, numbers), batch = photo_files(scale), scale.photo_batch
    half = len(paths) // batch // 2

    def plan():
        options = {"crop": RandomCrop(SIZE), "cache": None, "seed": 0, "remainder": "drop", "device": None}
        return plan_pipeline(images((paths, numbers)), batch_size=batch, **options)

    return Case(
        question=f"First batch from batch {half} of an epoch of JPEG files on",
        timed="first batch",
        goal=at_most(1.0),
        ways=[
            Way(TFOPT, f"plan.at(0, {half})", lambda: plan().at(0, half).build()),
            Way(HAND, f"shuffled paths, map, batch, skip({half})", lambda: by_hand(paths, numbers, batch).skip(half)),
            no_way("Grain", "its loader goes on from its own state alone"),
        ],
        examples=len(paths) - half * batch,
        batch=batch,
    )


def central(contents):
    """By hand: the middle is decoded and resized."""
    shape = tf.io.extract_jpeg_shape(contents)[:2]
    side = tf.cast(tf.round(0.875 * tf.cast(tf.reduce_min(shape), tf.float32)), tf.int32)
    cut = tf.concat([(shape - side) // 2, [side, side]], 0)
    image = tf.io.decode_and_crop_jpeg(contents, cut, channels=3)
    return tf.cast(tf.round(tf.image.resize(image, (SIZE, SIZE))), tf.uint8)


def jpeg_cached(folder, scale):
    """JPEG files that a cache in memory will keep."""
    files, batch = photo_files(scale), scale.photo_batch

    def stock():
        dataset = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files[0]))
        dataset = dataset.map(lambda path, at: (central(tf.io.read_file(path)), at), num_parallel_calls=AUTOTUNE)
        return dataset.cache().shuffle(_LATER * batch).batch(batch, drop_remainder=True).prefetch(AUTOTUNE)

    return Case(
        question="First batch of JPEG files, before a cache in memory is filled",
        timed="first batch",
        goal=GOAL,
        ways=[
            Way(
                TFOPT,
                'crop=CentralCrop(224), cache="memory"',
                lambda: tfopt(images(files), batch, crop=CentralCrop(SIZE), cache="memory"),
            ),
            Way(HAND, f"shuffled paths, map, cache, shuffle of {_LATER} batches, batch", stock),
            no_way("Grain", "it has no cache that can be shuffled"),
        ],
        examples=len(files[0]),
        batch=batch,
    )


def arrays(folder, scale):
    """Arrays."""
    data, batch = floats(scale.small_rows), scale.batch
    return Case(
        question=f"First batch of {scale.small_rows:,} rows in arrays",
        timed="first batch",
        goal=GOAL,
        ways=[
            Way(TFOPT, "build_pipeline((x, y))", lambda: tfopt(data, batch)),
            Way(HAND, "a permutation, one gather a batch", lambda: permuted(data, batch)),
            by_grain("source, shuffle, batch", lambda: Rows(*data), batch),
        ],
        examples=scale.small_rows,
        batch=batch,
        right=equal(data[0]),
    )


def of_records(folder, scale):
    """TFRecord files."""
    data, batch = floats(scale.records), scale.batch
    paths = write_plain(folder, map(serialised, *data))
    return Case(
        question=f"First batch of {scale.records:,} TFRecords",
        timed="first batch",
        goal=GOAL,
        ways=[
            Way(TFOPT, "records(paths, features=…)", lambda: tfopt(records(paths, features=FEATURES), batch)),
            Way(
                HAND,
                f"interleave, shuffle of {BUFFER:,}, batch, parse_example",
                lambda: parsed_in_batches(paths, batch, BUFFER),
            ),
            grains_way(folder, data, batch),
        ],
        examples=scale.records,
        batch=batch,
        right=equal(data[0]),
    )


def generator(folder, scale):
    """A generator of unknown length."""
    data, batch = floats(scale.records), scale.batch
    spec = tf.TensorSpec((16,), tf.float32), tf.TensorSpec((), tf.int64)

    def generated():
        return tf.data.Dataset.from_generator(lambda: zip(*data, strict=True), output_signature=spec)

    def stock():
        return generated().shuffle(BUFFER).batch(batch, drop_remainder=True).prefetch(AUTOTUNE)

    return Case(
        question=f"First batch of a generator of {len(data[0]):,} rows, a number that it does not know",
        timed="first batch",
        goal=GOAL,
        ways=[
            Way(TFOPT, "from_generator", lambda: tfopt(generated(), batch)),
            Way(HAND, f"from_generator, shuffle of {BUFFER:,}, batch", stock),
            no_way("Grain", "it reads by position"),
        ],
        examples=len(data[0]),
        batch=batch,
        right=equal(data[0]),
    )


CASES = {
    "first batch, jpeg": jpeg,
    "first batch, jpeg, cached": jpeg_cached,
    "first batch, from the middle": from_the_middle,
    "first batch, arrays": arrays,
    "first batch, records": of_records,
    "first batch, generator": generator,
}
