import itertools
import os
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, plan_pipeline, table
from tfopt.pipelines.tables import table as module
from tfopt.pipelines.tables.parquet import read_block

COUNT = 50
TYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
TYPES += ["float16", "float32", "float64"]
NUMBERS = {f"of {dtype}": np.arange(COUNT).astype(dtype) for dtype in TYPES}


def rows():
    """A table with a column of each kind that can be read, each row with its number in it."""
    lists = [list(range(number % 4)) for number in range(COUNT)]
    return pa.table(
        {
            "number": np.arange(COUNT),
            **NUMBERS,
            "text": [f"{number} ü" for number in range(COUNT)],
            "bytes": [bytes([number, 0, 255]) for number in range(COUNT)],
            "fixed bytes": pa.array([bytes([number, 0]) for number in range(COUNT)], pa.binary(2)),
            "category": pa.array(["a", "b"] * (COUNT // 2)).dictionary_encode(),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * COUNT, dtype="f4")), 3),
            "truths": pa.FixedSizeListArray.from_arrays(pa.array([True, False] * COUNT), 2),
            **{f"list of {kind}": pa.array(lists, pa.list_(kind)) for kind in (pa.uint32(), pa.int8(), pa.float64())},
            "list of bool": pa.array([[each > 1 for each in some] for some in lists], pa.large_list(pa.bool_())),
        }
    )


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of these rows in groups of 7."""
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    pq.write_table(rows(), path, row_group_size=7)
    return str(path)


@pytest.fixture
def by_row_group(monkeypatch):
    """Reads files by row group, however small they are."""
    monkeypatch.setattr(module, "_HELD_BYTES", 0)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1)


@pytest.fixture(params=["held", "by row group"])
def either(request):
    """Either holds files in memory, or reads them by row group."""
    if request.param != "held":
        request.getfixturevalue("by_row_group")


def write(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def numbers_of(dataset):
    return [int(number) for batch in dataset for number in batch["number"]]


def refused(data, match, **options):
    with pytest.raises(PipelineError, match=match):
        table(data, **options)


@pytest.mark.usefixtures("either")
def test_every_row_comes_back_as_it_was_written(path):
    examples = list(table(path).dataset().map(table(path).decode))
    assert [int(example["number"]) for example in examples] == list(range(COUNT))
    for number, example in enumerate(examples):
        for name, column in NUMBERS.items():
            assert (example[name].dtype, example[name].numpy()) == (column.dtype, column[number])
        assert example["text"].numpy().decode() == f"{number} ü"
        assert example["bytes"].numpy() == bytes([number, 0, 255])
        assert example["fixed bytes"].numpy() == bytes([number, 0])
        assert example["category"].numpy() == b"ab"[number % 2 :][:1]
        np.testing.assert_array_equal(example["vector"], np.arange(3 * number, 3 * number + 3, dtype="f4"))
        np.testing.assert_array_equal(example["truths"], [True, False])
        for kind in ("uint32", "int8", "float64"):
            found = example[f"list of {'double' if kind == 'float64' else kind}"]
            assert (found.dtype, found.numpy().tolist()) == (kind, list(range(number % 4)))
        assert example["list of bool"].numpy().tolist() == [each > 1 for each in range(number % 4)]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("given", ["path", "frame", "arrow", "csv"])
def test_whole_batches_are_those_of_single_rows(path, tmp_path, given):
    names = ["number", "of float32", "of float16", "of bool", "text", "vector"]
    if given == "csv":
        names = ["number", "of float32", "text"]
        rows().select(names).to_pandas().to_csv(tmp_path / "rows.csv", index=False)
    data = {"path": path, "frame": rows().to_pandas(), "arrow": rows(), "csv": tmp_path / "rows.csv"}[given]
    if given == "frame":
        names.remove("vector")  # which pandas gives as lists of any length
    source = table(data, columns=names)
    (batch,) = build_pipeline(source, batch_size=COUNT, training=False)
    assert set(batch) == set(names)
    for name in names:
        expected = rows().column(name).to_pylist()
        found = batch[name].numpy()
        assert [each.decode() for each in found] == expected if name == "text" else found.tolist() == expected


def test_labels_stand_apart(path):
    inputs, label = build_pipeline(table(path, columns=["text"], label="number"), batch_size=COUNT).element_spec
    assert list(inputs) == ["text"]
    assert label.dtype == tf.int64
    inputs, labels = build_pipeline(
        table(path, columns=["text", "number"], label=["number", "of bool"]), batch_size=COUNT
    ).element_spec
    assert (list(inputs), sorted(labels)) == (["text"], ["number", "of bool"])


@pytest.mark.usefixtures("by_row_group")
@pytest.mark.parametrize("size", first_quick([4, 64]))
def test_pools_are_cut_into_batches_and_shuffled_anew_in_each_epoch(path, monkeypatch, size):
    monkeypatch.setattr(module, "_MIXED_BLOCKS", 3)
    plan = plan_pipeline(table(path, columns=["number"]), batch_size=size, seed=1, remainder="keep")
    assert plan.stage("shuffle").setting == "pools of about 21"
    assert "read in pools" in plan.stage("cache").reason
    dataset = plan.build()
    assert len(dataset) == -(-COUNT // size)
    epochs = [[batch["number"].numpy().tolist() for batch in dataset] for _ in range(3)]
    assert epochs == [
        [batch["number"].numpy().tolist() for batch in again] for again in [plan.build()] for _ in range(3)
    ]
    for epoch in epochs:
        assert [len(batch) for batch in epoch] == [size] * (COUNT // size) + [COUNT % size] * (COUNT % size > 0)
        order = np.concatenate(epoch)
        assert sorted(order) == list(range(COUNT))
        first = order[:15]  # a pool has 15 or 21 rows, since the last group has one
        assert len({number // 7 for number in first}) <= 3
        assert sum(np.diff(first) < 0) > 2
    orders = [np.concatenate(epoch) for epoch in epochs]
    assert len({tuple(order) for order in orders}) == 3
    assert len({frozenset(order[:15] // 7) for order in orders}) > 1  # the groups that are taken first


@pytest.mark.usefixtures("by_row_group")
@pytest.mark.parametrize(
    ("position", "transform"), first_quick([((1, 5), lambda row: row["number"]), ((0, 7), None), ((2, 0), None)])
)
def test_pools_before_a_position_are_not_read(path, monkeypatch, position, transform):
    monkeypatch.setattr(module, "_MIXED_BLOCKS", 2)
    options = {"batch_size": 7, "seed": 1, "cache": None, "remainder": "keep", "prefetch": 0}
    plan = plan_pipeline(table(path, columns=["number"]), transform=transform, **options)
    dataset = plan.build()
    epochs = [[tf.nest.flatten(batch)[0].numpy().tolist() for batch in dataset] for _ in range(4)]
    epoch, batch = position
    moved = plan.at(epoch, batch)
    read = []
    monkeypatch.setattr(module, "read_block", lambda *given: read.append(given[1]) or read_block(*given))
    dataset = moved.build()
    found = [[tf.nest.flatten(batch)[0].numpy().tolist() for batch in dataset] for _ in range(epoch, 4)]
    assert found == [epochs[epoch][batch:], *epochs[epoch + 1 :]]
    assert len(read) <= (4 - epoch) * 8 - 2 * (batch * 7 // 14)
    assert "examples before it are not read" in str(moved) or not batch


@pytest.mark.slow
@pytest.mark.usefixtures("either")
def test_groups_of_very_different_sizes_are_all_read(tmp_path):
    sizes = (1, 40, 0, 3, 500, 2)
    with pq.ParquetWriter(tmp_path / "rows.parquet", pa.schema([("number", pa.int64())])) as writer:
        first = 0
        for size in sizes:
            writer.write_table(pa.table({"number": np.arange(first, first + size)}), row_group_size=max(size, 1))
            first += size
    source = table(tmp_path / "rows.parquet")
    assert source.count == sum(sizes)
    assert numbers_of(build_pipeline(source, batch_size=8, training=False)) == list(range(sum(sizes)))
    assert sorted(numbers_of(build_pipeline(source, batch_size=8, remainder="keep"))) == list(range(sum(sizes)))
    parts = [source.part(index, 3) for index in range(3)]
    assert max(part.count for part in parts) <= min(part.count for part in parts) + 1
    found = [numbers_of(build_pipeline(part, batch_size=8, training=False)) for part in parts]
    assert sorted(itertools.chain(*found)) == list(range(sum(sizes)))


@pytest.mark.usefixtures("either")
def test_one_row_is_enough(tmp_path):
    path = write(tmp_path / "one.parquet", {"number": [7]})
    assert numbers_of(build_pipeline(path, batch_size=4, remainder="keep")) == [7]


@pytest.mark.slow
@pytest.mark.usefixtures("either")
def test_files_are_read_in_order_by_list_glob_and_folder(tmp_path):
    for file in (1, 0, 2):
        write(tmp_path / f"{file}.parquet", {"number": np.arange(3 * file, 3 * file + 3)})
    (tmp_path / "_SUCCESS").touch()
    paths = [tmp_path / f"{file}.parquet" for file in range(3)]
    for data in (paths, str(tmp_path), f"{tmp_path}/*.parquet", [str(path) for path in paths]):
        assert numbers_of(build_pipeline(data, batch_size=2, training=False)) == list(range(9))
    assert numbers_of(build_pipeline(paths[::-1], batch_size=9, training=False)) == [6, 7, 8, 3, 4, 5, 0, 1, 2]


def test_frames_are_taken_as_they_are():
    frame = pd.DataFrame({"number": range(5), "kind": pd.Categorical(list("abcab"))}, index=list("vwxyz"))
    (batch,) = build_pipeline(frame[1:], batch_size=5, training=False)
    assert (batch["number"].numpy().tolist(), batch["kind"].numpy().tolist()) == (
        [1, 2, 3, 4],
        [b"b", b"c", b"a", b"b"],
    )
    assert table(frame).fingerprint() == table(frame.copy()).fingerprint()
    assert table(frame).fingerprint() != table(frame.assign(number=9)).fingerprint()
    sliced = rows()[3:9]
    (batch,) = build_pipeline(sliced.select(["number", "list of int8"]), batch_size=9, training=False, transform=sized)
    assert batch["number"].numpy().tolist() == [3, 4, 5, 6, 7, 8]
    assert batch["sum"].numpy().tolist() == [3, 0, 0, 1, 3, 0]


def sized(row):
    return {"number": row["number"], "sum": tf.reduce_sum(row["list of int8"])}


def test_lists_of_different_lengths_are_brought_to_one_in_transform(path):
    source = table(path, columns=["list of int8"])
    with pytest.raises(PipelineError, match="Bring them to one in `transform`"):
        plan_pipeline(source, batch_size=8)
    (batch,) = build_pipeline(
        source,
        batch_size=COUNT,
        training=False,
        transform=lambda row: tf.ensure_shape(
            tf.pad(row["list of int8"], [[0, 4 - tf.size(row["list of int8"])]]), (4,)
        ),
    )
    assert batch.numpy().sum(1).tolist() == [sum(range(number % 4)) for number in range(COUNT)]


def test_a_csv_file_takes_the_types_of_all_its_lines(tmp_path):
    lines = ["a,b", *(f"{number},x" for number in range(200_000)), "0.5,y"]  # beyond the first block of Arrow's
    (tmp_path / "long.csv").write_text("\n".join(lines))
    (batch,) = build_pipeline(table(tmp_path / "long.csv"), batch_size=200_001, training=False)
    assert (batch["a"].dtype, batch["a"][-1].numpy()) == (tf.float64, 0.5)


@pytest.mark.parametrize("text", ["a,b\nx,1\ncafé,2\n", "é,b\nx,1\n"])
def test_text_that_is_not_utf8_is_refused(tmp_path, text):
    (tmp_path / "bad.csv").write_text(text, encoding="latin-1")
    refused(tmp_path / "bad.csv", 'Expected text in UTF-8 .*encoding="latin-1"')


def test_several_csv_files_are_one_table(tmp_path):
    texts = {"a.csv": "number,x\n0,1\n1,2\n", "b.csv": "x,number\n0.5,2\n", "c.csv": "number,x\n3,9\n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    for data in ([tmp_path / name for name in texts], f"{tmp_path}/*.csv"):
        assert table(data).name == "table of 3 CSV files"
        (batch,) = build_pipeline(data, batch_size=9, training=False)
        assert batch["number"].numpy().tolist() == [0, 1, 2, 3]
        assert batch["x"].numpy().tolist() == [1.0, 2.0, 0.5, 9.0]
    (tmp_path / "b.csv").write_text("number\n7\n")
    refused(f"{tmp_path}/*.csv", "Found 'x' in only one of '.*a.csv' and '.*b.csv'")
    (tmp_path / "b.csv").write_text("number,x\n7,green\n")
    refused(f"{tmp_path}/*.csv", "one type for each column of 3 CSV files")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "Empty CSV file"),
        ("a,b\n", "at least one row in .*Found none"),
        ("a,b\n1,2\n3\n", "Expected 2 columns, got 1"),
        ("a,b\n1,\n3,4\n", "column 'b'. Found none in row 0 of .*csv' .rows without one: 1."),
        ("a,a\n1,2\n", "each column once .*'a' twice"),
        ("a,b\n2020-01-01,2\n", "'a' of the type date32.*Convert it to a number"),
        (f"a\n{2**64}\n5\n", "integers of up to 64 bits in the column 'a'"),
        (f"a\n{2**53 + 1}\n0.5\n", "that a float64 holds. Found integers of up to 9,007,199,254,740,992 beside"),
        ("a\n007\n07\n", "numbers, or text, in the column 'a'.*Found '007', which as a number is the same"),
        ("a;b\n1;2\n", "commas between the names.* Found ';'.*sep=';'"),
        ("a\tb\n1\t2\n", r"commas between the names.* Found '\\t'"),
        (",b\n0,1\n", "a name for each column.* Found none for column 1"),
    ],
)
def test_csv_files_that_would_be_misread_are_refused(tmp_path, text, match):
    (tmp_path / "bad.csv").write_text(text)
    refused(tmp_path / "bad.csv", match)


def written(folder, kind, values, dtype):
    """A column "x" beside numbers, as a CSV file, a Parquet file or a frame."""
    frame = pd.DataFrame({"n": range(len(values)), "x": pd.Series(values, dtype=dtype)})
    if kind == "frame":
        return frame
    path = folder / f"x.{kind}"
    frame.to_csv(path, index=False) if kind == "csv" else frame.to_parquet(path)
    return path


# One of each type, at the ends of what it holds.
COLUMNS = {
    "int64": ([-(2**63), 2**53 + 1, 2**63 - 1], "Int64", tf.int64),
    "uint64": ([0, 2**63, 2**64 - 1], "UInt64", tf.uint64),
    "float64": ([-0.5, 1e300, 5e-324], "Float64", tf.float64),
    "bool": ([True, False, True], "boolean", tf.bool),
    "text": (["NA", "null", "é; 7"], "str", tf.string),
}


@pytest.mark.parametrize("kind", ["csv", "parquet", "frame"])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_the_same_and_lacks_the_same_from_each_kind_of_table(tmp_path, kind, column):
    values, dtype, expected = COLUMNS[column]
    (batch,) = build_pipeline(table(written(tmp_path, kind, values, dtype)), batch_size=3, training=False)
    assert batch["x"].dtype == expected
    assert batch["x"].numpy().tolist() == [value.encode() if column == "text" else value for value in values]
    refused(written(tmp_path, kind, [*values, None], dtype), r"column 'x'.* Found none in row 3 .*without one: 1\)")


def test_quoted_text_may_be_empty(tmp_path):
    (tmp_path / "x.csv").write_text('n,x\n1,""\n2,b\n')
    (batch,) = build_pipeline(table(tmp_path / "x.csv"), batch_size=2, training=False)
    assert batch["x"].numpy().tolist() == [b"", b"b"]


@pytest.mark.parametrize(("texts", "kept"), [(["0x1F", "31"], [b"0x1F", b"31"]), (["007", "042"], [7, 42])])
def test_labels_are_not_merged(tmp_path, texts, kept):
    (tmp_path / "x.csv").write_text("\n".join(["n,x", *(f"1,{text}" for text in texts)]))
    (batch,) = build_pipeline(table(tmp_path / "x.csv"), batch_size=2, training=False)
    assert batch["x"].numpy().tolist() == kept


def test_integers_beside_fractions_of_another_file_do_not_change(tmp_path):
    (tmp_path / "a.csv").write_text(f"x\n{2**53 + 1}\n")
    (tmp_path / "b.csv").write_text("x\n0.5\n")
    refused(f"{tmp_path}/*.csv", "one type for each column of 2 CSV files.* 9007199254740993 not in range")


def test_the_index_of_a_frame_is_no_column_unless_it_is_named(tmp_path):
    frame = pd.DataFrame({"size": [1.0, 2.0]}, index=[7, 3])
    for index, name in ((None, "__index_level_0__"), ("id", "id")):
        frame.rename_axis(index).to_parquet(tmp_path / "i.parquet")
        for data in (tmp_path / "i.parquet", pa.Table.from_pandas(frame.rename_axis(index))):
            assert list(build_pipeline(table(data), batch_size=1).element_spec) == ["size"]
            assert build_pipeline(table(data, label=name), batch_size=1).element_spec[1].dtype == tf.int64
            assert list(build_pipeline(table(data, columns=[name]), batch_size=1).element_spec) == [name]


@pytest.mark.usefixtures("either")
def test_folders_of_hive_are_columns(tmp_path):
    frame = pd.DataFrame({"x": np.arange(4.0), "year": [2023, 2023, 2024, 2024], "kind": ["a b", "7", "a b", "7"]})
    frame.to_parquet(tmp_path, partition_cols=["year", "kind"])
    (batch,) = build_pipeline(tmp_path, batch_size=4, training=False)
    rows = sorted(zip(*(batch[name].numpy().tolist() for name in frame), strict=True))
    assert rows == [(x, year, kind.encode()) for x, year, kind in frame.itertuples(index=False)]
    features, label = build_pipeline(table(tmp_path, columns=["x"], label="year"), batch_size=1).element_spec
    assert (list(features), label.dtype) == (["x"], tf.int64)
    (tmp_path / "year=2025").mkdir()
    write(tmp_path / "year=2025" / "a.parquet", {"x": [4.0]})
    refused(tmp_path, "give the same columns a value.*: year, kind. Found .*2025/a.parquet")


def test_a_series_is_an_array(tmp_path):
    labels = pd.Series([0, 1, 2], name="y")
    pipeline = build_pipeline((np.arange(6.0).reshape(3, 2), labels), batch_size=3, training=False)
    assert [batch[1].numpy().tolist() for batch in pipeline] == [[0, 1, 2]]
    assert [batch.numpy().tolist() for batch in build_pipeline(labels, batch_size=3, training=False)] == [[0, 1, 2]]
    with pytest.raises(PipelineError, match=r"each row of data\[1\], a Series. Found none in row 1"):
        build_pipeline((np.ones(2), pd.Series(["a", None])), batch_size=2)


@pytest.mark.usefixtures("either")
def test_missing_values_are_refused_by_column_and_row(tmp_path):
    values = [*range(20), None]
    path = write(tmp_path / "rows.parquet", {"number": values}, row_group_size=8)
    match = rf"value in each row of the column 'number'\. Found none in row 20 of '{re.escape(path)}'"
    if module._HELD_BYTES:
        refused(path, match)
    else:
        with pytest.raises(tf.errors.OpError, match=match):
            list(table(path).dataset())
    inside = pa.array([[1, None], [2]], pa.list_(pa.int8()))
    refused(pa.table({"list": inside}), "column 'list' of the table. Found 1 numbers missing inside lists")
    fixed = pa.array([[1, 2], None], pa.list_(pa.int8(), 2))
    refused(pa.table({"list": fixed}), "column 'list'. Found none in row 1")
    refused(pd.DataFrame({"x": [1.0, np.nan]}), "column 'x'. Found none in row 1")


@pytest.mark.parametrize(
    ("column", "remedy"),
    [
        (pa.array([0], pa.timestamp("s")), "Convert it to a number"),
        (pa.array([1], pa.decimal128(5, 2)), "Cast it to float64"),
        (pa.array([{"a": 1}]), "Write each field as a column"),
        (pa.array([[[1]]]), "leave it out"),
        (pa.array([["a"]]), "leave it out"),
        (pa.nulls(1), "It holds nothing"),
        (pa.FixedSizeListArray.from_arrays(pa.array(["a"]), 1), "leave it out"),
    ],
)
def test_types_without_a_tensor_are_refused_by_name(column, remedy):
    refused(pa.table({"ok": [1], "odd": column}), f"'odd' of the type .*{remedy}")
    assert table(pa.table({"ok": [1], "odd": column}), columns=["ok"]).count == 1


def test_a_wrong_name_suggests_the_near_one(path):
    refused(path, r"a column 'numbr' in .*rows.parquet'.*Did you mean 'number'\?", columns=["numbr"])
    refused(path, r"Did you mean 'number'\?", label="nunber")
    refused(path, "columns besides the label", columns=["number"], label="number")


@pytest.mark.parametrize("options", [{"columns": "number"}, {"columns": []}, {"label": ["a", "a"]}, {"label": 3}])
def test_names_of_other_kinds_are_refused(path, options):
    with pytest.raises(TypeError, match=f"table.. expects .*`{next(iter(options))}`"):
        table(path, **options)


def test_files_that_differ_are_refused_by_name(tmp_path):
    first = write(tmp_path / "a.parquet", {"x": [1], "y": [1]})
    other = write(tmp_path / "b.parquet", {"x": [1.5], "y": [1]})
    more = write(tmp_path / "c.parquet", {"x": [1], "y": [1], "z": [1]})
    refused([first, other], f"one type for the column 'x'. '{first}' has int64, '{other}' has double")
    refused([first, more], f"'{more}' has a column 'z', '{first}' has none")
    assert table([first, more], columns=["x"]).count == 2
    assert table([first, other], columns=["y"]).count == 2


@pytest.mark.parametrize("length", [0, 100, -1])
def test_a_cut_file_is_refused(path, tmp_path, length):
    contents = Path(path).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(contents[:length])
    refused(tmp_path / "cut.parquet", "Expected a whole Parquet file at '.*cut.parquet'")


def test_other_files_are_refused(tmp_path):
    refused(tmp_path / "none.parquet", "Expected a file at .*none.parquet'. Found none")
    refused(tmp_path, "Expected Parquet files at .*Found none")
    refused(f"{tmp_path}/*.parquet", "Expected Parquet files at .*Found none")
    refused("gs://bucket/a.parquet", "on this machine")
    refused(write(tmp_path / "empty.parquet", {"x": pa.array([], pa.int8())}), "at least one row in .*empty.parquet'")
    with pytest.raises(TypeError, match="Received: int"):
        table(3)


@pytest.mark.usefixtures("either")
def test_a_damaged_group_is_named(tmp_path):
    path = write(tmp_path / "rows.parquet", {"number": np.arange(5000)}, row_group_size=1000, use_dictionary=False)
    chunk = pq.ParquetFile(path).metadata.row_group(3).column(0)
    with open(path, "r+b") as file:
        file.seek(chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)
    if module._HELD_BYTES:
        refused(path, f"rows 0 to 4999 of '{re.escape(path)}'. Arrow cannot")
    else:
        with pytest.raises(tf.errors.OpError, match=f"rows 3000 to 3999 of '{re.escape(path)}'. Arrow cannot"):
            list(table(path).dataset())


@pytest.mark.usefixtures("by_row_group")
def test_a_file_that_changes_is_noticed(tmp_path):
    path = write(tmp_path / "rows.parquet", {"number": np.arange(100)}, row_group_size=10)
    source = table(path)
    before = source.fingerprint()
    batches = iter(build_pipeline(source, batch_size=2, training=False, prefetch=0))
    next(batches)
    os.utime(path, ns=(1, 1))
    with pytest.raises(tf.errors.OpError, match=r"It has changed since\. Make the source again"):
        list(batches)
    with pytest.raises(PipelineError, match="It has changed since"):
        source.dataset()
    assert source.fingerprint() != before


@pytest.mark.usefixtures("either")
def test_the_fingerprint_follows_the_file_and_the_columns(tmp_path):
    path = write(tmp_path / "rows.parquet", {"number": [1], "other": [2]})
    before = table(path).fingerprint()
    assert table(path).fingerprint() == before
    assert table(path, columns=["number"]).fingerprint() != before
    os.utime(path, ns=(1, 1))
    assert table(path).fingerprint() != before


def test_only_the_columns_that_are_asked_for_decide_what_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_HELD_BYTES", 10_000)
    path = write(tmp_path / "rows.parquet", {"number": np.arange(100), "wide": [bytes(1000)] * 100})
    assert table(path).at is None  # its dictionary is small, its rows are not
    assert table(path, columns=["number"]).at is not None


def test_a_missing_pyarrow_is_an_error_that_says_what_to_install(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match=re.escape("pip install 'tfopt[parquet]'")):
        table(path)
