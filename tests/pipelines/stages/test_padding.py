"""Examples of different lengths: padded to the longest of a batch, or together with similar ones to a few lengths."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import (
    arrays,
    build_pipeline,
    next_tokens,
    per_batch,
    plan_pipeline,
    tokens,
    write_records,
)
from tfopt.pipelines.stages.buckets import WINDOW, choose_boundaries

COUNT = 203


def texts(count=COUNT, seed=0, longest=200):
    """Ids of which the first names the text; log-normal lengths."""
    draw = np.random.default_rng(seed)
    lengths = np.clip(draw.lognormal(2.5, 1, count), 1, longest).astype(int)
    return [np.concatenate([[number + 1], draw.integers(1, 9, length - 1)]) for number, length in enumerate(lengths)]


TEXTS = texts()
RAGGED = tf.ragged.constant(TEXTS, dtype=tf.int32)


def numbers_in(batches, given=TEXTS):
    """The numbers of the texts in each batch, whose ids and padding are checked."""
    found = []
    for batch, *_ in batches:
        for row in batch.numpy():
            text = given[row[0] - 1]
            assert row[: len(text)].tolist() == text.tolist()
            assert not row[len(text) :].any()
        found.append(batch.numpy()[:, 0].tolist())
    return found


def lengths_in(batches):
    return [batch.shape[1] for batch, *_ in batches]


def labelled(folder=None):
    return RAGGED, np.arange(COUNT)


def from_records(folder):
    if not folder.exists():
        write_records((RAGGED, np.arange(COUNT)), folder, shards=3, shuffle_seed=None)
    return str(folder)


def from_generator(folder):
    spec = tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(lambda: zip(TEXTS, range(COUNT), strict=True), output_signature=spec)


SOURCES = {"arrays": labelled, "records": from_records, "generator": from_generator}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_padded_to_the_longest_in_order(tmp_path, kind, cache):
    source = SOURCES[kind](tmp_path / "r")
    if cache == "folder":
        cache = tmp_path / "cache"
    key = {"cache_key": "texts"} if kind == "generator" else {}
    dataset = build_pipeline(source, batch_size=10, training=False, pad="batch", cache=cache, **key)
    for _ in range(2):
        epoch = list(dataset)
        assert list(itertools.chain(*numbers_in(epoch))) == list(range(1, COUNT + 1))
        expected = [max(map(len, TEXTS[at : at + 10])) for at in range(0, COUNT, 10)]
        assert lengths_in(epoch) == expected
        assert np.concatenate([labels for _, labels in epoch]).tolist() == list(range(COUNT))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"pad": "batch"}, {"bucket": True}], ids=str)
@pytest.mark.parametrize(
    ("kind", "remainder"),
    [
        ("arrays", "keep"),
        ("records", "drop"),
        ("generator", "pad"),
        ("arrays", "drop"),
    ],
)
def test_each_text_once_in_each_epoch(tmp_path, options, kind, remainder):
    source = SOURCES[kind](tmp_path / "r")
    if remainder == "pad":
        options = {**options, "transform": lambda x, y: (x, y, tf.ones(()))}
    plan = plan_pipeline(source, batch_size=10, seed=1, remainder=remainder, **options)
    epochs = [[numbers_in([batch])[0] for batch in dataset] for dataset in [plan.build()] for _ in range(2)]
    assert epochs == [[numbers_in([batch])[0] for batch in dataset] for dataset in [plan.build()] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        counts = np.bincount(list(itertools.chain(*epoch)), minlength=COUNT + 1)[1:]
        if remainder == "pad":
            assert counts.min() == 1
            assert counts.sum() == 210
        else:
            assert counts.max() == 1
            assert counts.sum() == (200 if remainder == "drop" else COUNT)
        assert all(len(batch) == 10 for batch in epoch[:20])
        if kind != "generator":
            assert len(epoch) == plan.to_dict()["steps_per_epoch"] == len(plan.build())


@pytest.mark.slow
def test_a_bucket_pads_less_and_to_few_lengths():
    plan = plan_pipeline(labelled(), batch_size=4, seed=1, bucket=True, remainder="keep")
    chosen = plan.to_dict()["bucket_lengths"]
    assert 1 < len(chosen) <= 8
    assert chosen[-1] >= max(map(len, TEXTS))
    epoch = list(plan.build())
    assert set(lengths_in(epoch)) <= set(chosen)
    padded = list(build_pipeline(labelled(), batch_size=4, seed=1, pad="batch", remainder="keep"))
    bucketed, longest = (sum(batch.shape.num_elements() for batch, _ in each) for each in (epoch, padded))
    assert bucketed < 0.75 * longest
    # A dropped remainder must not be the longest texts.
    left_out = [set(range(1, COUNT + 1)) - set(itertools.chain(*numbers_in(e))) for e in epochs_without_rest(10)]
    found = [len(TEXTS[number - 1]) for numbers in left_out for number in numbers]
    assert np.mean(found) < 2 * np.mean([len(text) for text in TEXTS])


def epochs_without_rest(count):
    dataset = build_pipeline(labelled(), batch_size=10, seed=1, bucket=True, remainder="drop")
    return [list(dataset) for _ in range(count)]


def test_batches_differ_from_epoch_to_epoch():
    dataset = build_pipeline(labelled(), batch_size=10, seed=1, bucket=True)
    first, second = ({frozenset(batch) for batch in numbers_in(dataset)} for _ in range(2))
    assert len(first & second) < len(first) / 4


@pytest.mark.slow
@pytest.mark.parametrize("cache", [None, "memory", "folder"])
def test_it_goes_on_at_any_batch(tmp_path, cache):
    given = texts(count=WINDOW * 2 * 2 + 35)
    ragged = tf.ragged.constant(given, dtype=tf.int32)
    cache = tmp_path if cache == "folder" else cache
    plan = plan_pipeline(
        (ragged, np.arange(len(given))), batch_size=2, seed=1, bucket=True, cache=cache, augment=drawn, remainder="keep"
    )
    dataset = plan.build()
    epochs = [[[part.numpy().tolist() for part in batch] for batch in dataset] for _ in range(3)]
    for batch in (1, WINDOW, 2 * WINDOW + 17) if cache is None else (0, WINDOW - 1, WINDOW + 7, 2 * WINDOW + 18):
        moved = plan.at(1, batch).build()
        found = [[[part.numpy().tolist() for part in each] for each in moved] for _ in range(2)]
        assert found == [epochs[1][batch:], epochs[2]]


def drawn(text, label, seed):
    return text, label, tf.random.stateless_uniform((), seed)


@pytest.mark.slow
def test_the_last_batch_function_gets_padded_batches():
    seen = []

    def batches(x, y):
        seen.append(x.shape)
        return x * 2, y

    for options in ({"pad": "batch"}, {"bucket": True}):
        dataset = build_pipeline(labelled(), batch_size=10, augment=per_batch(batches), remainder="drop", **options)
        assert sum(len(y) for _, y in dataset) == 200
        for x, y in dataset.take(5):
            expected = np.zeros(x.shape, np.int32)
            for row, number in zip(expected, y.numpy(), strict=True):
                row[: len(TEXTS[number])] = TEXTS[number] * 2
            assert np.array_equal(x, expected)
    assert {tuple(shape) for shape in seen} <= {(10, None), (None, None)}


def test_parts_of_any_type_are_padded():
    lengths = [1, 5, 2, 3]

    def examples():
        for number, length in enumerate(lengths):
            yield {
                "text": np.array([b"a" * (number + 1)] * length),
                "flags": np.ones(length, bool),
                "half": np.full(length, 0.5, np.float16),
                "image": np.full((length, 2, 3), number + 1, np.uint8),
            }

    spec = {
        "text": tf.TensorSpec((None,), tf.string),
        "flags": tf.TensorSpec((None,), tf.bool),
        "half": tf.TensorSpec((None,), tf.float16),
        "image": tf.TensorSpec((None, 2, 3), tf.uint8),
    }
    dataset = tf.data.Dataset.from_generator(examples, output_signature=spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(4))
    for options, longest in (({"pad": "batch", "shuffle": False}, 5), ({"bucket": True}, 8)):
        (batch,) = build_pipeline(dataset, batch_size=4, **options)
        for row in range(4):
            number = int(batch["image"][row, 0, 0, 0]) - 1
            length = lengths[number]
            assert batch["text"][row].numpy().tolist() == [b"a" * (number + 1)] * length + [b""] * (longest - length)
            assert batch["flags"][row].numpy().tolist() == [True] * length + [False] * (longest - length)
            assert batch["half"][row].numpy().tolist() == [0.5] * length + [0] * (longest - length)
            assert batch["image"][row].numpy().sum() == 6 * length * (number + 1)
            assert batch["image"].shape == (4, longest, 2, 3)


def test_two_texts_of_an_example_get_one_length_where_they_are_bucketed():
    other = texts(seed=1)
    pair = {"from": RAGGED, "to": tf.ragged.constant(other, dtype=tf.int32)}
    for batch in build_pipeline(pair, batch_size=10, seed=1, bucket=True):
        assert batch["from"].shape == batch["to"].shape
        numbers_in([(batch["from"],)])
        numbers_in([(batch["to"],)], other)
        assert batch["from"].numpy()[:, 0].tolist() == batch["to"].numpy()[:, 0].tolist()


def test_a_text_longer_than_all_that_were_looked_at():
    given = [np.full(3, at + 1) for at in range(1100)]
    given[1090] = np.concatenate([[1091], np.ones(40, int)])
    flat = tf.ragged.constant(given, dtype=tf.int32)
    dataset = tf.data.Dataset.from_tensor_slices((flat, np.arange(1100))).map(
        lambda x, y: (tf.ensure_shape(x, (None,)), y)
    )
    plan = plan_pipeline(dataset, batch_size=100, bucket=True)
    assert plan.to_dict()["bucket_lengths"] == [8]
    epoch = list(plan.build())
    assert sorted(lengths_in(epoch)) == [8] * 10 + [64]
    assert sorted(itertools.chain(*numbers_in(epoch, given))) == list(range(1, 1101))


@pytest.mark.parametrize("seed", range(5))
def test_the_lengths_add_the_fewest_padding(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, 88, 60)
    chosen = choose_boundaries(lengths)
    rounded = -(-lengths // 8) * 8
    candidates = np.unique(rounded)

    def cost(limits):
        return np.array(limits)[np.searchsorted(limits, rounded)].sum()

    least = min(
        cost([*some, candidates[-1]]) for some in itertools.combinations(candidates[:-1], min(7, len(candidates) - 1))
    )
    assert cost(chosen) == least
    assert len(chosen) <= 8


def test_boundaries_of_very_many_lengths():
    chosen = choose_boundaries(np.arange(1, 100_000))
    assert len(chosen) == 8
    assert chosen[-1] == 100_000
    assert choose_boundaries(np.zeros(3, int)) == (8,)


@pytest.mark.slow
def test_next_tokens_make_what_packing_makes():
    given = [text for text in TEXTS if len(text) <= 64]
    padded = build_pipeline(tokens(given), transform=next_tokens, bucket=True, batch_size=16, seed=1, remainder="keep")
    packed = build_pipeline(tokens(given), pack=64, batch_size=16, training=False)
    keras.utils.set_random_seed(0)
    ids, positions = (keras.Input((None,), dtype="int32", name=name) for name in ("tokens", "positions"))
    embedded = keras.layers.Embedding(300, 8)(ids) + keras.layers.Embedding(64, 8)(positions)
    model = keras.Model({"tokens": ids, "positions": positions}, keras.layers.Dense(300)(embedded))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"))

    def total(batches):
        return sum(
            float(model.test_on_batch({name: inputs[name] for name in ("tokens", "positions")}, labels, weights))
            for inputs, labels, weights in batches
        )

    def weighed(batches):
        return sum(float(tf.reduce_sum(weights)) for _, _, weights in batches)

    assert weighed(padded) == weighed(packed) == sum(len(text) - 1 for text in given)
    assert total(padded) == pytest.approx(total(packed), rel=1e-5)
    assert sum(int(tf.reduce_sum(inputs["segments"])) for inputs, _, _ in padded) == sum(map(len, given))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"bucket": True, "training": False}, "Expected a shuffle for bucket=True"),
        ({"bucket": True, "shuffle": False}, "Expected a shuffle for bucket=True"),
        ({"bucket": True, "service": "grpc://127.0.0.1:1"}, "Expected no `service` for bucket=True"),
        ({"pad": "epoch"}, "value for `pad`"),
        ({"pad": "batch", "pack": 8}, "Expected `pack`, or `pad` and `bucket`"),
        ({"pad": "batch", "cache": "device"}, "cache='device' expects examples of one shape"),
    ],
)
def test_options_that_do_not_fit(options, text):
    with pytest.raises(ValueError, match=text):
        plan_pipeline(labelled(), batch_size=2, **options)


def test_examples_that_do_not_fit():
    rows = np.zeros((10, 4))
    with pytest.raises(ValueError, match="bucket=True expects examples of different lengths before"):
        plan_pipeline(rows, batch_size=2, bucket=True)
    unknown = tf.data.Dataset.range(4).map(lambda x: tf.py_function(lambda: np.zeros(3), [], tf.float64))
    with pytest.raises(ValueError, match="pad='batch' expects dense tensors of known rank"):
        plan_pipeline(unknown, batch_size=2, pad="batch")
    images = tf.data.Dataset.from_generator(lambda: iter([]), output_signature=tf.TensorSpec((None, None, 3)))
    with pytest.raises((ValueError, PipelineError), match=r"bucket=True expects the length to be the first axis"):
        plan_pipeline(images, batch_size=2, bucket=True)
    with pytest.raises(PipelineError, match="pad them with pad='batch'"):
        plan_pipeline(labelled(), batch_size=2)
    plan = plan_pipeline(rows, batch_size=2, pad="batch")
    assert "need no padding" in " ".join(str(plan).split())
    assert all(batch.shape == (2, 4) for batch in plan.build())


def test_an_augment_that_brings_all_to_one_shape_needs_no_bucket():
    def cut(x, y):
        return tf.ensure_shape(tf.pad(x, [[0, 8]])[:8], (8,)), y

    plan = plan_pipeline(labelled(), batch_size=10, seed=1, bucket=True, augment=cut)
    assert "need no padding" in " ".join(str(plan).split())
    numbers = [row[0] for batch, _ in plan.build() for row in batch.numpy()]
    assert len(set(numbers)) == len(numbers) == 200
    expected = list(plan.build())[5:]
    for found, batch in zip(plan.at(0, 5).build(), expected, strict=True):
        assert np.array_equal(found[1], batch[1])


def test_ragged_arrays_are_rows():
    source = arrays({"x": RAGGED, "y": np.arange(COUNT)})
    found = list(source.dataset().map(source.decode))
    assert [each["x"].numpy().tolist() for each in found] == [text.tolist() for text in TEXTS]
    parts = [source.part(index, 2) for index in range(2)]
    for index, part in enumerate(parts):
        found = [each["x"].numpy().tolist() for each in part.dataset().map(part.decode)]
        assert found == [text.tolist() for text in TEXTS[index::2]]
    with pytest.raises(PipelineError, match="common length"):
        arrays((RAGGED, np.arange(3)))
