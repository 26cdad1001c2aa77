"""`tf.train.Checkpoint` saves an iterator in the middle of an epoch, and a restored one goes on as if never stopped."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from python_child import run_python
from quick import first_quick

from tfopt.pipelines import build_pipeline, per_batch
from tfopt.pipelines.sources import source as source_module

COUNT = 1003
READ = 40  # batches of ten, before the iterator is saved


def plus_noise(features, label, seed):
    return features + tf.random.stateless_uniform((4,), seed), label


def scaled(features, label, seed):
    return features * tf.random.stateless_uniform((), seed), label


def doubled(features, label):
    return 2 * features, label


@pytest.fixture(autouse=True)
def _held(monkeypatch):
    """Rows are held on the host as those of large arrays are; functions capture small ones, which TensorFlow saves."""
    monkeypatch.setattr(source_module, "_QUICKLY_COPIED", 0)


@pytest.fixture
def sources(tmp_path):
    """The same rows, of which the labels tell which they are, as arrays and as files."""
    rows = np.random.default_rng(0).normal(size=(COUNT, 4)).astype("float32"), np.arange(COUNT)
    paths = str(tmp_path / "features.npy"), str(tmp_path / "labels.npy")
    for path, array in zip(paths, rows, strict=True):
        np.save(path, array)
    return {"arrays": rows, "npy": paths}


def contents(batches):
    return [[np.asarray(part).tolist() for part in batch] for batch in batches]


def labels(batches):
    return sorted(label for batch in batches for label in batch[1])


def save(iterator, folder):
    return tf.train.Checkpoint(iterator=iterator).save(str(folder / "saved"))


def restored(dataset, path):
    iterator = iter(dataset)
    tf.train.Checkpoint(iterator=iterator).restore(path).assert_consumed()
    return iterator


AUGMENTED = {"augment": [plus_noise, per_batch(scaled)]}


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "npy"])
@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1, **AUGMENTED, "remainder": "keep", "prefetch": 2},
        {"seed": 1, "transform": per_batch(doubled), "cache": None, "remainder": "keep"},
        {"seed": 1, "transform": doubled, "cache": "memory", **AUGMENTED, "remainder": "pad"},
        {"seed": 1, "shuffle": False, "transform": doubled, "cache": None, **AUGMENTED, "remainder": "keep"},
        {"training": False, "transform": doubled, "cache": "memory", "remainder": "pad"},
    ],
)
def test_a_restored_iterator_goes_on_and_so_do_the_epochs_after_it(sources, source, options, tmp_path):
    dataset = build_pipeline(sources[source], batch_size=10, **options)
    contents(dataset)  # the first epoch
    iterator = iter(dataset)
    contents(itertools.islice(iterator, READ))
    path = save(iterator, tmp_path)
    uninterrupted = contents(iterator), contents(dataset), contents(dataset)
    assert len(uninterrupted[0]) > 50
    again = build_pipeline(sources[source], batch_size=10, **options)
    assert (contents(restored(again, path)), contents(again), contents(again)) == uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("source", ["arrays", "npy"])
@pytest.mark.parametrize(
    ("cache", "functions"),
    [(None, {"transform": doubled, **AUGMENTED}), ("memory", {})],
)
def test_without_a_seed_the_epoch_still_gives_each_example_once(sources, source, cache, functions, tmp_path):
    options = {"batch_size": 10, "remainder": "keep", "cache": cache, **functions}
    iterator = iter(build_pipeline(sources[source], **options))
    before = labels(contents(itertools.islice(iterator, READ)))
    path = save(iterator, tmp_path)
    for _ in range(2):
        again = build_pipeline(sources[source], **options)
        assert sorted(before + labels(contents(restored(again, path)))) == list(range(COUNT))
        assert labels(contents(again)) == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
def test_the_file_does_not_hold_the_data(captured, monkeypatch, tmp_path):
    monkeypatch.setattr(source_module, "_QUICKLY_COPIED", 1e9 * captured)
    rows = np.zeros((1000, 5000), "float32")  # 20 MB
    np.save(tmp_path / "rows.npy", rows)
    for source in (rows, str(tmp_path / "rows.npy")):
        iterator = iter(build_pipeline(source, batch_size=2, prefetch=2))
        next(iterator)
        path = Path(save(iterator, tmp_path))
        size_bytes = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        assert size_bytes < 2e6  # some batches and all positions


IN_ANOTHER_PROCESS = """
import sys
import numpy as np, tensorflow as tf
from tfopt.pipelines import build_pipeline, per_batch

def scaled(features, label, seed):
    return features * tf.random.stateless_uniform((), seed), label

def contents(batches):
    return [[part.numpy().tolist() for part in batch] for batch in batches]

features, labels = "features.npy", "labels.npy"
source = (features, labels) if sys.argv[1] == "npy" else (np.load(features), np.load(labels))
dataset = build_pipeline(source, batch_size=10, augment=[scaled, per_batch(scaled)], **eval(sys.argv[2]))
iterator = iter(dataset)
tf.train.Checkpoint(iterator=iterator).restore(sys.argv[3]).assert_consumed()
print(contents(iterator))
print(contents(dataset))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "options"), [("arrays", {"seed": 1, "cache": "memory"}), ("npy", {"remainder": "keep"})]
)
def test_another_process_goes_on(sources, source, options, tmp_path):
    dataset = build_pipeline(sources[source], batch_size=10, augment=[scaled, per_batch(scaled)], **options)
    iterator = iter(dataset)
    before = contents(itertools.islice(iterator, READ))
    path = save(iterator, tmp_path)
    printed = run_python(IN_ANOTHER_PROCESS, source, repr(options), path, cwd=tmp_path)
    rest, following = (eval(line) for line in printed.splitlines())
    if "seed" in options:
        assert (rest, following) == (contents(iterator), contents(dataset))
    else:
        assert labels(before + rest) == labels(following) == list(range(COUNT))


def noisy(features, label):
    return features + tf.random.uniform(()), label


def through_python(features, label):
    return tf.ensure_shape(tf.py_function(lambda row: row, [features], tf.float32), (4,)), label


BIAS = tf.Variable(0.5)
ANOTHER = tf.data.Dataset.from_tensors(0.5)


@pytest.mark.parametrize(
    "options",
    first_quick(
        [
            {"augment": noisy},
            {"augment": per_batch(noisy)},
            {"augment": through_python},
            {"transform": lambda features, label: (features + BIAS, label), "cache": None},
            {"transform": lambda features, label: (features + ANOTHER.get_single_element(), label), "cache": None},
            {"device": "CPU:0"},
        ]
    ),
)
def test_what_would_not_go_on_is_not_saved(sources, options, tmp_path):
    """What the user's functions keep, TensorFlow does not save; nor the batches that are on their way to a device."""
    iterator = iter(build_pipeline(sources["arrays"], batch_size=10, prefetch=2, **options))
    next(iterator)
    with pytest.raises((tf.errors.FailedPreconditionError, tf.errors.UnimplementedError), match=r"stateful|Generator"):
        save(iterator, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda features, label, table: (features, table.lookup(label)),
        tf.function(lambda features, label, table: (tf.debugging.check_numerics(features, "rows"), label)),
    ],
)
def test_functions_without_a_state_of_their_own_are_saved(sources, function, tmp_path):
    initial = tf.lookup.KeyValueTensorInitializer(tf.range(5, dtype=tf.int64), tf.range(5, 10, dtype=tf.int64))
    table = tf.lookup.StaticHashTable(initial, -1)
    options = {"seed": 1, "augment": lambda features, label: function(features, label, table), "prefetch": 2}
    iterator = iter(build_pipeline(sources["arrays"], batch_size=10, **options))
    next(iterator)
    path = save(iterator, tmp_path)
    expected = contents(iterator)
    assert contents(restored(build_pipeline(sources["arrays"], batch_size=10, **options), path)) == expected
