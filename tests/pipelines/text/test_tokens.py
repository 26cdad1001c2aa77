"""Documents of tokens: whole, and in rows that a language model trains on."""

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, plan_pipeline, tokens
from tfopt.pipelines.as_source import as_source

SIZE = 16
END = 1


def documents(count=50, seed=0):
    """Tokens from 2 on, and END at last; no two documents are alike."""
    draw = np.random.default_rng(seed)
    return [[*draw.integers(2, 5000, draw.integers(0, 2 * SIZE + 2)).tolist(), END] for _ in range(count)]


def pieces(batches):
    """What is in each row: tokens and labels of each segment. Padding and positions are checked on the way."""
    for inputs, labels, weights in batches:
        assert {part.dtype.name for part in inputs.values()} | {labels.dtype.name} == {"int32"}
        assert weights.dtype == tf.float32
        for row in range(len(labels)):
            ids, segments, positions = (inputs[name][row].numpy() for name in ("tokens", "segments", "positions"))
            row_labels, row_weights = labels[row].numpy(), weights[row].numpy()
            assert len(ids) == SIZE
            used = int((segments > 0).sum())
            assert (segments[used:] == 0).all()
            for part in (ids, positions, row_labels, row_weights):
                assert (part[used:] == 0).all()
            for segment in range(1, segments.max() + 1):
                place = np.flatnonzero(segments == segment)
                assert (np.diff(place) == 1).all()
                assert positions[place].tolist() == list(range(len(place)))
                assert row_labels[place][row_weights[place] == 0].tolist() in ([], [0])
                known = row_weights[place] == 1
                yield ids[place].tolist(), row_labels[place][known].tolist(), bool(known.all())


def expected_pieces(given):
    for document in given:
        for start in range(0, len(document), SIZE):
            piece = document[start : start + SIZE]
            goes_on = start + SIZE < len(document)
            yield piece, document[start + 1 : start + SIZE + 1], goes_on


def saved(given, path, dtype):
    np.save(path, np.concatenate(given).astype(dtype))
    return tokens(path, end=END)


KINDS = {
    "lists": lambda given, path: given,
    "arrays": lambda given, path: tokens([np.array(document, np.uint16) for document in given]),
    "ragged": lambda given, path: tf.ragged.constant(given),
    "one after the other": lambda given, path: tokens(np.concatenate(given), end=END),
    "a file": lambda given, path: saved(given, path, np.uint16),
    "a file of 64 bits": lambda given, path: saved(given, str(path), np.int64),
    "without the last end": lambda given, path: tokens(np.concatenate(given)[:-1], end=END),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_token_once(tmp_path, kind):
    given = documents()
    source = KINDS[kind](given, tmp_path / "tokens.npy")
    if kind == "without the last end":
        given[-1] = given[-1][:-1]
    expected = sorted(expected_pieces([document for document in given if document]))
    packed = build_pipeline(source, pack=SIZE, batch_size=4, training=False)
    assert sorted(pieces(packed)) == expected
    shuffled = build_pipeline(source, pack=SIZE, batch_size=4, seed=3, remainder="keep")
    epochs = [list(pieces(shuffled)) for _ in range(2)]
    assert [sorted(epoch) for epoch in epochs] == [expected] * 2
    assert epochs[0] != epochs[1]
    again = build_pipeline(source, pack=SIZE, batch_size=4, seed=3, remainder="keep")
    assert [list(pieces(again)) for _ in range(2)] == epochs
    whole = [example.numpy().tolist() for example in as_source(source).dataset().map(as_source(source).decode)]
    assert whole == given


@pytest.mark.slow
def test_it_goes_on_at_a_position_and_is_divided(tmp_path):
    given = documents()
    plan = plan_pipeline(given, pack=SIZE, batch_size=4, seed=3)
    dataset = plan.build()
    first, second = ([list(pieces([batch])) for batch in dataset] for _ in range(2))
    moved = plan.at(epoch=1, batch=3).build()
    assert [list(pieces([batch])) for batch in moved] == second[3:]
    assert first != second
    packed = tokens(given).packed(SIZE, slice(None))
    parts = [packed.part(index, 3) for index in range(3)]
    batches = [part.dataset().map(part.decode).batch(1) for part in parts]
    assert sorted(piece for part in batches for piece in pieces(part)) == sorted(expected_pieces(given))


@pytest.mark.slow
def test_a_split_divides_whole_documents():
    given = documents()
    plans = [plan_pipeline(given, pack=SIZE, batch_size=2, split=0.2, training=each, seed=1) for each in (True, False)]
    validation = [piece for piece, *_ in pieces(plans[1].build())]
    rows = build_pipeline(given, pack=SIZE, batch_size=2, split=0.2, seed=1, remainder="keep")
    kept = [piece for piece, *_ in pieces(rows)]
    whole = {tuple(document): [document[at : at + SIZE] for at in range(0, len(document), SIZE)] for document in given}
    found = [sum(all(piece in part for piece in each) for each in whole.values()) for part in (kept, validation)]
    assert found == [40, 10]
    assert len(kept) + len(validation) == sum(map(len, whole.values()))
    assert "split=0.2: 40 of 50 to train on" in " ".join(str(plans[0]).split())


def test_the_plan_says_what_is_used():
    plan = plan_pipeline(documents(), pack=SIZE, batch_size=4, training=False)
    used = sum(len(document) for document in documents()) / (plan.to_dict()["count"] * SIZE)
    assert f"50 documents, packed into rows of 16 tokens; {100 * used:.1f} % of them used" in " ".join(
        str(plan).split()
    )
    assert used > 0.97
    assert plan.to_dict()["options"]["pack"] == SIZE


@pytest.mark.slow
def test_a_cache_knows_the_tokens_and_the_length(tmp_path):
    def key(given, size=SIZE):
        return plan_pipeline(given, pack=size, batch_size=1, cache=tmp_path, training=False).to_dict()["cache_key"]

    given = documents(5)
    apart = [given[0], given[1][:3], given[1][3:], *given[2:]]
    assert key(given) == key(tokens(given))
    assert len({key(given), key(given, 8), key(documents(5, seed=1)), key(apart)}) == 4


@pytest.mark.parametrize(
    ("given", "options", "error", "text"),
    [
        (
            [["a", "b"]],
            {},
            TypeError,
            "Expected a list or array of token ids for each document. Received for document 0",
        ),
        ([[1, [2]]], {}, (TypeError, ValueError), ""),
        ("text", {}, ValueError, "Expected `end` for documents that follow one another"),
        ([[1], [2]], {"end": 1}, ValueError, "Leave `end` out"),
        (5, {}, TypeError, "Expected documents: a list of lists"),
        (np.zeros((2, 2), int), {"end": 0}, TypeError, "integers, one axis. Received: int64 of the shape"),
        (np.zeros(2), {"end": 0}, TypeError, "integers, one axis. Received: float64"),
        (np.array([2**40, 0]), {"end": 0}, ValueError, "Expected ids that fit int32"),
        ([[], []], {}, PipelineError, "Expected at least one token"),
        ([], {}, PipelineError, "Expected at least one token"),
        (np.zeros(0, int), {"end": 0}, PipelineError, "Expected at least one token"),
        ("missing.npy", {"end": 0}, PipelineError, "Expected a .npy file at"),
    ],
)
def test_what_is_no_token_is_named(given, options, error, text):
    with pytest.raises(error) as caught:
        tokens(given, **options)
    assert text in str(caught.value)


def test_ids_of_64_bits_and_empty_documents():
    for kinds in (("uint64", "uint64"), ("uint64", "int64"), ("int64", "uint16")):
        given = [np.array([1, 2], kinds[0]), np.array([], kinds[0]), np.array([3], kinds[1])]
        source = tokens(given)
        assert [each.numpy().tolist() for each in source.dataset().map(source.decode)] == [[1, 2], [], [3]]
    with pytest.raises(ValueError, match="Expected ids that fit int32"):
        tokens([np.array([2**40], "uint64"), [1]])
    with pytest.raises(PipelineError, match=r"Expected at least one token to pack\. Found none in these 3 documents"):
        plan_pipeline(tokens([[]] * 10 + [[1, 2]]), pack=8, batch_size=1, split=0.3, training=False)


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match=r"Expected documents of tokens for pack=8. Received: arrays. Pass a list"):
        plan_pipeline(np.zeros((4, 8), int), pack=8, batch_size=1)
    with pytest.raises(ValueError, match="pack"):
        plan_pipeline([[1, 2]], pack=1, batch_size=1)
    with pytest.raises(PipelineError, match="Expected examples of one shape"):
        plan_pipeline([[1, 2], [3]], batch_size=1)
