"""Lines of text files, and documents that a tokenizer makes of them."""

import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, lines, records, tokens, write_records

TEXT = "a line\n\nümlaut, and a NUL\0\r\nc\rd\nlast"
LINES = ["a line", "", "ümlaut, and a NUL\0", "c\rd", "last"]


def encode(texts):
    return [list(text.encode()) for text in texts]


def documents_in(source):
    return [each.numpy().tolist() for each in source.dataset().map(source.decode)]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "b.txt").write_bytes(TEXT.encode())
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\n\n")
    (tmp_path / "empty.text").touch()
    return tmp_path


def test_a_set_of_paths_is_refused():
    with pytest.raises(TypeError, match=r"paths in an order. Received: a set, whose order is another in each process"):
        lines({"a.txt", "b.txt"})


def read(dataset):
    return [line.decode() for batch in dataset.as_numpy_iterator() for line in batch]


def test_lines_as_they_are(files):
    one, both = lines(files / "b.txt"), lines(str(files / "*.txt"))
    assert (one.count, one.name, both.name) == (len(LINES), "lines in 1 file", "lines in 2 files")
    assert read(build_pipeline(one, batch_size=8, training=False)) == LINES
    assert read(build_pipeline(both, training=False)) == ["first", "", *LINES]
    listed = lines([files / "b.txt", files / "a.txt"])
    assert read(build_pipeline(listed, training=False)) == [*LINES, "first", ""]
    dataset = build_pipeline(both, batch_size=2, seed=1, remainder="keep")
    first, second = read(dataset), read(dataset)
    assert first != second
    assert sorted(first) == sorted(second) == sorted(["first", "", *LINES])


def test_what_is_no_text_is_named(files):
    (files / "latin.txt").write_bytes("one\ntwö\n".encode("latin-1"))
    with pytest.raises(PipelineError, match=r"Expected text in UTF-8. Line 2 of .*latin.txt' has other bytes"):
        lines(files / "latin.txt")
    with pytest.raises(PipelineError, match="Expected at least one line"):
        lines(files / "empty.text")
    with pytest.raises(PipelineError, match=r"Nothing matches .*nothing\*"):
        lines(str(files / "nothing*"))
    with pytest.raises(PipelineError, match="It cannot be read"):
        lines(files)
    with pytest.raises(PipelineError, match="empty list"):
        lines([])
    with pytest.raises(TypeError, match="path of text files"):
        lines([3])


def test_a_tokenizer_makes_documents(files):
    expected = encode(["first", "", *LINES])
    found = tokens(lines(str(files / "*.txt")), tokenize=encode)
    assert documents_in(found) == expected
    assert documents_in(tokens(LINES, tokenize=encode)) == encode(LINES)
    assert documents_in(tokens(LINES, tokenize=lambda texts: tf.ragged.constant(encode(texts)))) == encode(LINES)
    many = [f"text {number}" for number in range(2500)]
    sizes = []

    def counted(texts):
        sizes.append(len(texts))
        return encode(texts)

    assert documents_in(tokens(many, tokenize=counted)) == encode(many)
    assert sizes == [1000, 1000, 500]


def test_documents_of_another_source_are_read(tmp_path):
    given = [[1, 2], [], [3, 4, 5]]
    ragged = tf.ragged.constant(given, dtype=tf.int32)
    write_records(ragged_source(ragged), tmp_path / "r", shuffle_seed=None)
    for source in (records(tmp_path / "r"), tf.data.Dataset.from_generator(lambda: given, output_signature=SPEC)):
        assert documents_in(tokens(source)) == given
        (batch,) = build_pipeline(tokens(source), pack=8, batch_size=1, training=False)
        assert batch[0]["tokens"].numpy().tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]


SPEC = tf.TensorSpec((None,), tf.int32)


def ragged_source(ragged):
    return tf.data.Dataset.from_tensor_slices(ragged).map(lambda row: tf.ensure_shape(row, (None,)))


@pytest.mark.parametrize(
    ("texts", "tokenize", "error", "text"),
    [
        (LINES, lambda texts: [1, 2], PipelineError, "Expected a list of ids for each of 5 texts.*Found: 2"),
        (LINES, lambda texts: 7, PipelineError, "Found: int"),
        (LINES, lambda texts: [["a"]] * 5, TypeError, "Received for document 0"),
        ("text.txt", encode, TypeError, r"Expected texts for `tokenize`: lines\(paths\)"),
        ([""], encode, PipelineError, "Expected at least one token"),
    ],
)
def test_a_tokenizer_that_returns_something_else(texts, tokenize, error, text):
    with pytest.raises(error, match=text):
        tokens(texts, tokenize=tokenize)
