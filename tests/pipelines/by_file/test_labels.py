"""Labels of files: pairs, columns of tables by name, and lists of names as vectors."""

import re

import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick
from unwrapped import unwrapped

from tfopt.errors import PipelineError
from tfopt.pipelines import build_pipeline, images, plan_pipeline

NUMBERS = [3, 1, 4, 1, 5, 9]
NAN = float("nan")
LISTS = [["dog", "cat"], [], ["cat"], ["cow"], ["cat", "cow", "dog"], ["dog", "dog"]]
HOT = np.array([[1, 0, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1], [0, 0, 1]], np.float32)


@pytest.fixture
def files(tmp_path, picture):
    """Six images, shades 0 to 50 in steps of ten."""
    return [picture(tmp_path / f"{index}.png", shade=10 * index) for index in range(6)]


def read(source, **options):
    """Each image's shade with its label, in one epoch."""
    plan = plan_pipeline(source, **{"batch_size": 4, "training": False} | options)
    return [
        (int(image[1, 1, 0]), label.tolist())
        for batch, labels in plan.build().as_numpy_iterator()
        for image, label in zip(batch, labels, strict=True)
    ]


class Table:
    """As much of a pandas DataFrame as is needed; pandas itself is not imported."""

    def __init__(self, columns):
        self._columns, self.columns = columns, list(columns)

    def __iter__(self):
        return iter(self.columns)

    def __getitem__(self, name):
        return np.asarray(self._columns[name])


@pytest.mark.parametrize("form", ["tuples", "lists", "paths and labels", "arrays", "default names"])
def test_pairs_and_two_sequences(files, form):
    given = {
        "tuples": list(zip(files, NUMBERS, strict=True)),
        "lists": list(map(list, zip(files, NUMBERS, strict=True))),
        "paths and labels": (files, NUMBERS),
        "arrays": (np.array(files), np.array(NUMBERS)),
        "default names": Table({"paths": files, "labels": NUMBERS}),
    }[form]
    assert read(images(given)) == list(zip(range(0, 60, 10), NUMBERS, strict=True))
    assert sorted(read(images(given), training=True, remainder="keep")) == read(images(given))


@pytest.mark.parametrize("form", first_quick(["csv", "pyarrow", "pandas", "Path", "dict"], 2))
def test_columns_by_name(files, tmp_path, form):
    pyarrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    columns = {"number": NUMBERS, "kind": ["b", "a"] * 3, "file": files}
    pandas.DataFrame(columns).to_csv(tmp_path / "photos.csv", index=False)
    table = {
        "csv": str(tmp_path / "photos.csv"),
        "Path": tmp_path / "photos.csv",
        "pandas": pandas.DataFrame(columns, index=range(6, 0, -1)).astype({"kind": "category"}),
        "pyarrow": pyarrow.table(columns | {"kind": pyarrow.array(columns["kind"]).dictionary_encode()}),
        "dict": columns,
    }[form]
    assert read(images(table, column="file", label="number")) == list(zip(range(0, 60, 10), NUMBERS, strict=True))
    kinds = images(table, column="file", label="kind")
    assert kinds.class_names == ("a", "b")
    assert [label for _, label in read(kinds)] == [1, 0] * 3


def test_labels_keep_their_type_and_shape(files):
    boxes = np.random.default_rng(0).random((6, 4)).astype(np.float32)
    dataset = build_pipeline(images((files, boxes)), batch_size=2, training=False)
    assert dataset.element_spec[1] == tf.TensorSpec((2, 4), tf.float32)
    np.testing.assert_array_equal(np.concatenate([batch for _, batch in dataset]), boxes)


@pytest.mark.parametrize("form", first_quick(["lists", "pandas", "pairs", "sets", "pyarrow"], 2))
@pytest.mark.parametrize("classes", first_quick([(None,), (("dog", "bird", "cat", "cow"),)]))
def test_lists_of_names_become_vectors(files, form, classes):
    pyarrow = pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    columns = {"paths": files, "labels": LISTS}
    source = images(
        {
            "lists": (files, LISTS),
            "pairs": list(zip(files, LISTS, strict=True)),
            "sets": (files, list(map(set, LISTS))),
            "pandas": pandas.DataFrame(columns),
            "pyarrow": pyarrow.table(columns),
        }[form],
        classes=classes,
    )
    expected = HOT if classes is None else np.insert(HOT, 0, 0, axis=1)[:, [3, 0, 1, 2]]
    assert source.class_names == (classes or ("cat", "cow", "dog"))
    assert read(source) == list(zip(range(0, 60, 10), expected.tolist(), strict=True))
    plan = plan_pipeline(source, batch_size=4)
    assert plan.build().element_spec[1].dtype == "float32"
    said = f"labels are vectors of {len(source.class_names)} classes, 1 for each in the list and 0 elsewhere"
    assert f"{said}; empty lists: 1" in unwrapped(plan)
    assert ("lists that repeat a class, which counts once: 1" in unwrapped(plan)) is (form != "sets")


def test_the_number_of_names_does_not_change_what_labels_are(files):
    """All of one length would make an array, which is another kind of label."""
    pairs = [["dog", "cat"], ["cat", "cow"]] * 3
    expected = [[1, 0, 1], [1, 1, 0]] * 3
    for lists in (pairs, np.array(pairs)):
        assert [label for _, label in read(images((files, lists)))] == expected
    assert [label for _, label in read(images((files, [["a"]] * 6)))] == [[1]] * 6
    assert [label for _, label in read(images((files, [[]] * 6), classes=["a", "b"]))] == [[0, 0]] * 6


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (
            lambda f: [*zip(f, NUMBERS, strict=True), "x.png"],
            TypeError,
            r"expects pairs.*index 6: 'x.png'.*Pass a list",
        ),
        (lambda f: [(path, 1, 2) for path in f], TypeError, "expects pairs.*index 0"),
        (lambda f: [], PipelineError, "at least one example.*Check"),
        (lambda f: (f, [1, 2]), PipelineError, "one common length.*Pass"),
        (lambda f: (f, ["a", None] * 3), TypeError, "among names: NoneType.*Pass"),
        (lambda f: (f, 3), TypeError, "labels in a sequence. Received as labels: 3. Pass"),
        (lambda f: ([3] * 6, [1] * 6), TypeError, "Received as one: 3. Pass"),
        (lambda f: (f[0], [1]), TypeError, "paths in a sequence.*Pass"),
        (lambda f: {"path": f, "label": [1] * 6}, ValueError, r"columns 'paths' and 'labels'.*'path', 'label'. Name"),
        (lambda f: (f, [1] * 6, [2] * 6), TypeError, r"\(paths, labels\). Received a tuple of 3. Pass"),
        (lambda f: (set(f), range(6)), TypeError, "paths in an order. Received: a set"),
        (lambda f: {"paths": f, "labels": frozenset(range(6))}, TypeError, "labels in an order. Received: a frozenset"),
        (lambda f: (f, [["a"]] * 5 + ["a"]), TypeError, "list of names for each.*index 5: 'a'"),
        (lambda f: (f, ["a"] + [["a"]] * 5), TypeError, "list of names for each.*index 0: 'a'"),
        (lambda f: (f, [["a", 3]] + [["a"]] * 5), TypeError, "index 0.*Pass a list of strings"),
        (lambda f: (f, [["a"]] * 5), PipelineError, "one common length"),
        (lambda f: (f, [[1], [2, 3]] * 3), TypeError, "differ in length. Pass names"),
        (lambda f: (f, [None, ["a"]] * 3), TypeError, "index 0: None"),
        # NumPy would make "nan", "3" and "True" of these, and of no names an array without columns.
        (lambda f: [(path, label) for path, label in zip(f, ["a", "b", NAN] * 2, strict=True)], TypeError, "float"),
        (lambda f: (f, ["a", "b", 3] * 2), TypeError, "among names: int"),
        (lambda f: {"paths": f, "labels": ["a", True] * 3}, TypeError, "among names: bool"),
        (lambda f: (f, [b"a", b"b", 3] * 2), TypeError, r"numbers or names.*Received: \|S"),
        (lambda f: (f, np.array(["2020"] * 6, "M8[D]")), TypeError, "numbers or names.*Received: datetime64"),
        (lambda f: [(path, NAN) for path in f], PipelineError, "Found NaN at index 0"),
        (lambda f: {"paths": f, "labels": [1.5, NAN] * 3}, PipelineError, "Found NaN at index 1"),
        (lambda f: (f, [[]] * 6), PipelineError, "Name the classes in `classes`"),
        (lambda f: (f, ["a", "", "b"] * 2), PipelineError, "Found an empty one"),
        (lambda f: (f, [name.split(";") for name in ("a;b", "")] * 3), PipelineError, "Found an empty one"),
    ],
)
def test_wrong_pairs_and_lists_are_refused(files, change, error, text):
    with pytest.raises(error, match=text):
        images(change(files))


def test_names_stay_as_they_are(files):
    """NumPy cuts NULs at the end of strings, and its own type of them is printed otherwise."""
    source = images((files, ["a", "a\0", "b"] * 2))
    assert repr(source.class_names) == repr(("a", "a\0", "b"))
    assert [label for _, label in read(source)] == [0, 1, 2] * 2
    assert images((files, ["", "a"] * 3), classes=["a", ""]).class_names == ("a", "")
    assert np.isnan(read(images((files, np.full(6, NAN))))[3][1])


def test_labels_are_those_of_the_call(files):
    numbers = np.array(NUMBERS)
    source = images((files, numbers))
    numbers[:] = 0
    assert [label for _, label in read(source)] == NUMBERS


def test_classes_are_in_the_order_given(files):
    names = ["c", "b", "a"]
    for classes in (names, np.array(names), map(str, names), dict.fromkeys(names).keys()):
        source = images((files, ["a", "b", "c"] * 2), classes=classes)
        assert source.class_names == ("c", "b", "a")
        assert [label for _, label in read(source)] == [2, 1, 0] * 2


@pytest.mark.parametrize(
    ("classes", "error"),
    [
        *[(wrong, TypeError) for wrong in ("abc", [1, 2], {"a", "b"}, {"a": 1})],
        *[(wrong, ValueError) for wrong in ([], ["a", "b", "a"])],
    ],
)
def test_wrong_classes_are_refused(files, photos, classes, error):
    for given in ((files, ["a"] * 6), photos):
        with pytest.raises(error, match=r"`classes`\. Received: .*\. Pass"):
            images(given, classes=classes)


@pytest.mark.parametrize(
    ("labels", "found"),
    [(["cat", "cow"] * 3, "'cow'"), ([0, 1, 2] * 2, "2"), (LISTS, r"'dog'\]. Found 'cow'")],
)
def test_labels_that_are_no_class_are_refused(files, labels, found):
    with pytest.raises(PipelineError, match=f"{found}. Add it to `classes`"):
        images((files, labels), classes=["cat", "dog"])


def test_columns_that_are_missing_or_incomplete_are_refused(files, tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"file": files, "number": [1, None, 3, 4, 5, 6], "kind": ["a", None] * 3})
    with pytest.raises(ValueError, match=r"columns 'file' and 'labels'.*'file', 'number', 'kind'. Name .* `label`"):
        images(frame, column="file")
    with pytest.raises(PipelineError, match=r"each row of the column .number.\. Found NaN at index 1"):
        images(frame, column="file", label="number")
    with pytest.raises(TypeError, match=r"NoneType|float"):
        images(frame, column="file", label="kind")
    with pytest.raises(TypeError, match=r"Received as one: None|nan"):
        images(frame, column="kind", label="kind")
    for other in (files[0], (files, NUMBERS)):
        with pytest.raises(TypeError, match="only with a table"):
            images(other, column="file")
    gone = str(tmp_path / "gone.csv")
    with pytest.raises(PipelineError, match=rf"{re.escape(gone)}'. Found none"):
        images(gone)


@pytest.mark.slow
def test_a_split_and_a_cache_on_disk_keep_the_vectors(files, tmp_path):
    source = images((files, LISTS))
    whole = dict(zip(range(0, 60, 10), HOT.tolist(), strict=True))
    options = {"batch_size": 2, "split": 0.5, "seed": 1, "cache": str(tmp_path / "cache"), "remainder": "keep"}
    train, validate = (read(source, **options, training=training) for training in (True, False))
    assert dict(train) | dict(validate) == whole
    again = images((files, [*LISTS[:5], ["cow"]]))
    changed = dict(read(again, **options, training=True) + read(again, **options, training=False))
    assert changed == whole | {50: [0.0, 1.0, 0.0]}
