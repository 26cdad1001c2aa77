"""Random pipelines beside what NumPy says they give: every example as often, and changed as, it should be."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from part_sources import COUNT, NAMES, source
from quick import first_quick

from tfopt.pipelines import per_batch, plan_pipeline

ALL = np.arange(COUNT)
EPOCHS = 3


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Returns the folder of their files."""
    return tmp_path_factory.mktemp("sources")


def drawn(number):
    """A random pipeline: the name of its source, the options, and what NumPy needs to know of them."""
    random = np.random.default_rng(number)

    def one(*values):
        return values[random.integers(len(values))]

    options = {
        "batch_size": int(random.integers(1, 11)),
        "training": one(True, False),
        "shuffle": one(None, None, True, False),
        "seed": one(None, 0, 7),
        "cache": one(None, "memory", "auto", "./cache"),
        "remainder": one(None, "keep", "drop"),
        "split": one(None, None, 0.1, 0.3),
        "prefetch": one("auto", 0, 2),
    }
    ways = {"times": int(random.integers(1, 5)), "by_batch": one(True, False), "noise": one(None, "one", "batch")}
    chosen = {name: value for name, value in options.items() if value is not None or name == "cache"}
    return str(one(*NAMES)), chosen | {"cache_key": str(ways["times"])}, ways


def built(folder, name, options, ways):
    """The plan: examples (3 floats, label), the first of which is the number that stands for the example."""
    made_of, to_number = source(folder, name)

    def pair(*raw):
        number = to_number(*raw) if to_number else raw[0]
        return tf.stack([tf.cast(number, tf.float32)] * 3, axis=-1) * ways["times"], tf.cast(number, tf.int64) % 5

    def noisy(features, label, seed):
        shape = tf.shape(label)  # () for an example, and the batch's size for many
        noise = tf.random.stateless_uniform(shape, seed, minval=0.25, maxval=0.75)
        return features + noise[..., tf.newaxis] * [0.0, 1.0, 1.0], label

    whole = ways["by_batch"] and to_number is None
    augment = {None: None, "one": noisy, "batch": per_batch(noisy)}[ways["noise"]]
    return plan_pipeline(made_of, transform=per_batch(pair) if whole else pair, augment=augment, **options)


def read(dataset):
    """The batches of an epoch, as NumPy arrays."""
    return [(features.numpy(), label.numpy()) for features, label in dataset]


def belonging(options):
    """The numbers that belong to a pipeline."""
    if "split" not in options:
        return ALL
    order = np.random.RandomState(0).permutation(COUNT)
    held = round(options["split"] * COUNT)
    return np.sort(order[held:] if options["training"] else order[:held])


def numbers_in(batches, ways):
    """The numbers of the examples in batches, once it is seen that each is whole, and augmented as it should be."""
    for features, labels in batches:
        numbers = np.rint(features[:, 0] / ways["times"]).astype(int)
        np.testing.assert_array_equal(features[:, 0], (numbers * ways["times"]).astype(np.float32))
        np.testing.assert_array_equal(labels, numbers % 5)
        noise = features[:, 1] - features[:, 0]
        np.testing.assert_array_equal(features[:, 1], features[:, 2])
        if ways["noise"] is None:
            assert not noise.any()
        else:
            assert ((noise > 0.2) & (noise < 0.8)).all()
            assert ways["noise"] == "batch" or len(set(noise.tolist())) > len(noise) // 2
    return [np.rint(features[:, 0] / ways["times"]).astype(int).tolist() for features, _ in batches]


@pytest.mark.parametrize("number", first_quick(range(300), 3, every=10))
def test_a_random_pipeline_gives_what_numpy_says(sources, number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, options, ways = drawn(number)
    if name == "generator" and "split" in options:
        options.pop("split")
    plan = built(sources, name, options, ways)
    dataset = plan.build()
    epochs = [read(dataset) for _ in range(EPOCHS)]

    own, size = belonging(options), options["batch_size"]
    shuffled = options.get("shuffle", options["training"])
    drops = plan.options.remainder == "drop"
    assert options.get("remainder", plan.options.remainder) == plan.options.remainder
    steps = len(own) // size if drops else -(-len(own) // size)
    assert int(dataset.cardinality()) == len(dataset) == steps
    found = [numbers_in(epoch, ways) for epoch in epochs]
    for epoch in found:
        whole = [size] * (len(own) // size) + [len(own) % size] * (not drops and len(own) % size > 0)
        assert [len(batch) for batch in epoch] == whole
        flat = [each for batch in epoch for each in batch]
        assert len(set(flat)) == len(flat)
        if name == "tensorflow-datasets":  # whose files are read side by side, so that no number is a position
            assert set(flat) <= set(ALL.tolist())
        elif shuffled:
            assert set(flat) <= set(own.tolist())
        else:
            assert flat == own[: len(flat)].tolist()
    flats = [tuple(itertools.chain(*epoch)) for epoch in found]
    if shuffled and len(own) > 20 and steps:
        assert len(set(flats)) == EPOCHS
        assert all(flat != tuple(own[: len(flat)]) for flat in flats)
    if "seed" not in options:
        return
    # The same on the next run, whatever is cached by now, and from any position.
    again = [read(dataset) for dataset in [built(sources, name, options, ways).build()] for _ in range(EPOCHS)]
    at = int(np.random.default_rng((number, 1)).integers(steps + 1))
    moved = read(built(sources, name, options, ways).at(epoch=1, batch=at).build())
    for one, other in ((epochs[0], again[0]), (epochs[2], again[2]), (epochs[1][at:], moved)):
        assert len(one) == len(other)
        for pair, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(pair[0], same[0])
            np.testing.assert_array_equal(pair[1], same[1])
