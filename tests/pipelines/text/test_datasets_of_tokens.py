"""Vectors of token ids as a `tf.data.Dataset`, as TensorFlow users have them: packed, padded and bucketed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline, tokens
from tfopt.pipelines.text.tokens import next_tokens

DOCUMENTS = [np.random.default_rng(n).integers(1, 50, 1 + n % 23).tolist() for n in range(60)]
TEXTS = [" ".join(f"w{token}" for token in document) for document in DOCUMENTS]


def generated():
    read = tf.data.Dataset.from_generator(lambda: iter(DOCUMENTS), output_signature=tf.TensorSpec([None], tf.int64))
    return read.apply(tf.data.experimental.assert_cardinality(len(DOCUMENTS)))


def vectorised(*, ragged):
    """As `TextVectorization` numbers the texts, and the same as lists."""
    layer = keras.layers.TextVectorization(ragged=ragged)
    layer.adapt(TEXTS)
    number = {word: at for at, word in enumerate(layer.get_vocabulary())}
    return tf.data.Dataset.from_tensor_slices(TEXTS).map(layer), [
        [number[word] for word in text.split()] for text in TEXTS
    ]


KINDS = {
    "a generator": lambda: (generated(), DOCUMENTS),
    "slices of a ragged tensor": lambda: (
        tf.data.Dataset.from_tensor_slices(tf.ragged.constant(DOCUMENTS, dtype=tf.int32)),
        DOCUMENTS,
    ),
    "TextVectorization": lambda: vectorised(ragged=False),
    "TextVectorization, ragged": lambda: vectorised(ragged=True),
}


def values(dataset):
    return [tf.nest.map_structure(np.ndarray.tolist, batch) for batch in dataset.as_numpy_iterator()]


@pytest.fixture(params=KINDS)
def given(request):
    """A dataset, and its documents as lists."""
    return KINDS[request.param]()


def test_packed_as_lists_are(given):
    dataset, documents = given
    for options in ({"training": False}, {"seed": 3}, {"training": False, "split": 0.2}):
        packed, expected = (build_pipeline(each, pack=32, batch_size=2, **options) for each in (dataset, documents))
        assert values(packed) == values(expected)


def test_documents_of_one_length_are_packed_as_lists_are():
    rows = np.arange(1, 41).reshape(8, 5)
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    packed, expected = (build_pipeline(each, pack=32, batch_size=1, seed=1) for each in (dataset, rows.tolist()))
    assert values(packed) == values(expected)


@pytest.mark.parametrize(
    "options", [{"pad": "batch", "training": False}, {"pad": "batch", "seed": 3}, {"bucket": True, "seed": 3}]
)
def test_padded_and_bucketed_with_every_token_once(given, options):
    dataset, documents = given
    batches = values(build_pipeline(dataset, batch_size=4, remainder="keep", **options))
    rows = [[token for token in row if token] for batch in batches for row in batch]
    assert sorted(rows) == sorted(documents)
    assert (rows == documents) is ("seed" not in options)


def test_what_tokens_takes_of_datasets_is_the_same(given):
    dataset, documents = given
    expected = build_pipeline(tokens(documents), batch_size=4, pad="batch", transform=next_tokens, training=False)
    found = build_pipeline(tokens(dataset), batch_size=4, pad="batch", transform=next_tokens, training=False)
    assert values(found) == values(expected)


@pytest.mark.parametrize(
    ("dataset", "error", "text"),
    [
        (lambda: tf.data.Dataset.zip(generated(), tf.data.Dataset.range(60)), TypeError, "each one tensor"),
        (lambda: generated().repeat(), PipelineError, "never ends"),
        (lambda: generated().map(lambda ids: tf.cast(ids, tf.float32)), TypeError, "token ids"),
        (lambda: tf.data.Dataset.from_tensor_slices(TEXTS), TypeError, "token ids"),
    ],
    ids=["labelled", "endless", "floats", "texts"],
)
def test_datasets_that_cannot_be_packed_are_named(dataset, error, text):
    with pytest.raises(error, match=text):
        plan_pipeline(dataset(), pack=32, batch_size=2)
