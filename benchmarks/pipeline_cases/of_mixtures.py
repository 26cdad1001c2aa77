"""Cases of mixtures: rows of two arrays, in fixed proportions."""

import tensorflow as tf

from pipeline_cases import GRAIN, HAND, TFOPT, Case, Way, at_least, no_way
from pipeline_cases.by_grain import grain, version
from pipeline_cases.of_arrays import AUTOTUNE, equal, floats
from tfopt.pipelines import mix

_SHARE = 0.7  # of the first array, in rows and in the mixture


def small_rows(folder, scale):
    """Two arrays of small rows, of which each is read once."""
    (inputs, labels), batch = floats(scale.small_rows), scale.batch
    cut = round(_SHARE * scale.small_rows)
    parts = [(inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:])]
    weights = [7.0, 3.0]

    def by_hand():
        datasets = [tf.data.Dataset.from_tensor_slices(part).shuffle(len(part[0])) for part in parts]
        mixed = tf.data.Dataset.sample_from_datasets(datasets, [0.7, 0.3], stop_on_empty_dataset=False)
        return mixed.batch(batch, drop_remainder=True, num_parallel_calls=AUTOTUNE).prefetch(AUTOTUNE)

    def by_grain():
        def rows(part):
            return grain.MapDataset.range(len(part[0])).seed(0).shuffle().map(lambda at: (part[0][at], part[1][at]))

        mixed = grain.MapDataset.mix([rows(part) for part in parts], weights)
        return mixed.batch(batch, drop_remainder=True).to_iter_dataset()

    ours = list(zip(parts, weights, strict=True))
    note = f"grain {version()}, MapDataset.mix of shuffled rows, batch"
    return Case(
        question=f"{scale.small_rows:,} rows of 64 bytes in two arrays, mixed 7 to 3, shuffled",
        goal=at_least(1.0),
        ways=[
            Way(
                TFOPT,
                "mix([(rows, 0.7), (others, 0.3)])",
                lambda: mix(ours, stop="all", batch_size=batch, remainder="drop", device=None).build(),
            ),
            Way(HAND, "from_tensor_slices, shuffle, sample_from_datasets, batch", by_hand),
            Way(GRAIN, note, by_grain) if grain else no_way(GRAIN, "not installed"),
        ],
        examples=scale.small_rows,
        batch=batch,
        right=equal(inputs),
    )


CASES = {"mixed rows": small_rows}
