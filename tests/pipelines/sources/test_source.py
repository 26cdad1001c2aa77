import h5py
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError
from tfopt.pipelines import Source, build_pipeline, write_records


def numbers():
    return tf.data.Dataset.range(6)


def test_a_source_of_ones_own():
    source = Source(name="squares", dataset=numbers, decode=lambda number: (number, number**2))
    dataset = build_pipeline(source, batch_size=3, training=False)
    assert len(dataset) == 2
    assert [int(square) for _, batch in dataset for square in batch] == [0, 1, 4, 9, 16, 25]


def test_a_given_count_makes_an_unknown_one_known():
    source = Source(name="even", dataset=lambda: numbers().filter(lambda number: number % 2 == 0), count=3)
    assert len(build_pipeline(source, batch_size=3)) == 1


def test_a_wrong_count_fails_in_the_epoch():
    source = Source(name="even", dataset=lambda: numbers().filter(lambda number: number % 2 == 0), count=4)
    with pytest.raises(tf.errors.FailedPreconditionError, match="3"):
        list(build_pipeline(source, batch_size=2, training=False))


def test_a_count_unlike_the_cardinality_is_refused():
    with pytest.raises(PipelineError, match=r"gives as its `count`\. Its dataset has 6"):
        build_pipeline(Source(name="numbers", dataset=numbers, count=4), batch_size=2)
    with pytest.raises(PipelineError, match="Its dataset has no end"):
        build_pipeline(Source(name="numbers", dataset=lambda: numbers().repeat(), count=4), batch_size=2)


def test_the_origin_names_an_element_that_fails():
    def origin(number):
        return tf.strings.join(["number ", tf.as_string(number)])

    source = Source(name="numbers", dataset=numbers, decode=lambda number: 6 // (number - 4), origin=origin)
    with pytest.raises(PipelineError, match="stage decode failed on 'number 4'"):
        build_pipeline(source, batch_size=2)


@pytest.mark.parametrize(
    "arguments", [{"dataset": None}, {"decode": 3}, {"count": "4"}, {"count": True}, {"count": 4.0}]
)
def test_wrong_types_are_refused(arguments):
    with pytest.raises(TypeError, match=f"{next(iter(arguments))}"):
        Source(**({"name": "numbers", "dataset": numbers} | arguments))


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="at least 0"):
        Source(name="numbers", dataset=numbers, count=-1)


def test_a_count_of_numpy_is_taken():
    source = Source(name="numbers", dataset=numbers, count=np.int64(6))
    assert type(source.count) is int
    assert len(build_pipeline(source, batch_size=3)) == 2


@pytest.mark.parametrize("kind", ["images", "npy", "hdf5", "records", "indexed records"])
def test_a_relative_path_means_the_same_after_a_change_of_folder(tmp_path, monkeypatch, picture, kind):
    def prepare(place, number):
        monkeypatch.chdir(place)
        picture(place / "pictures" / "a" / "x.png", shade=number)
        np.save("rows.npy", np.full((4, 1), number))
        with h5py.File("rows.h5", "w") as file:
            file["x"] = np.full((4, 1), number)
        with tf.io.TFRecordWriter("rows.tfrecord") as writer:
            writer.write(str(number).encode())
        write_records(np.full((4, 1), number), "indexed")

    paths = {
        "images": "pictures",
        "npy": "rows.npy",
        "hdf5": "rows.h5",
        "records": "rows.tfrecord",
        "indexed records": "indexed",
    }
    for name, number in (("first", 1), ("second", 2)):
        (tmp_path / name).mkdir()
        prepare(tmp_path / name, number)
    monkeypatch.chdir(tmp_path / "first")
    dataset = build_pipeline(paths[kind], batch_size=1, training=False)
    monkeypatch.chdir(tmp_path / "second")
    first = next(iter(dataset))
    found = first[0][0, 1, 1, 0] if kind == "images" else first[0] if kind == "records" else first[0, 0]
    assert int(found) == 1
