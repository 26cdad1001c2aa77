"""Generator functions and other objects that yield batches, and what batches may consist of."""

import collections
import functools
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import Source, build_pipeline, loader, mix, per_batch, plan_pipeline, write_records
from tfopt.pipelines.sources import parts

Pair = collections.namedtuple("Pair", ["x", "y"])


def batches(sizes=(4, 4, 2)):
    start = 0
    for size in sizes:
        yield np.arange(start, start + size, dtype="float32")[:, None], np.arange(start, start + size)
        start += size


class Sized:
    """Can be iterated again and again, and says how long that is."""

    def __init__(self, said, sizes=(4, 4, 2)):
        self.said, self.sizes = said, sizes

    def __len__(self):
        return self.said

    def __iter__(self):
        return batches(self.sizes)


def labels(dataset):
    return [y.tolist() for _, y in dataset.as_numpy_iterator()]


EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize("data", [batches, functools.partial(batches, (4, 4, 2)), lambda: list(batches())])
def test_a_generator_function_is_called_in_each_epoch(data):
    dataset = build_pipeline(data)
    assert labels(dataset) == labels(dataset) == EXPECTED
    assert dataset.element_spec == (tf.TensorSpec((None, 1), tf.float32), tf.TensorSpec((None,), tf.int64))
    assert int(dataset.cardinality()) == tf.data.UNKNOWN_CARDINALITY


def test_a_generator_is_refused_with_the_way_out():
    for refusing in (loader, build_pipeline):
        with pytest.raises(TypeError, match=r"ass the function that makes it, without calling it"):
            refusing(batches())
    same = batches()
    with pytest.raises(tf.errors.OpError, match="TypeError: Expected a new iterator in each epoch"):
        list(build_pipeline(lambda: same))
    with pytest.raises(TypeError, match=r"<lambda> returned int. Use `yield`"):
        build_pipeline(lambda: 3)
    with pytest.raises(TypeError, match=r"Received: list\. Pass arrays"):
        loader([np.zeros(3)])


@pytest.mark.parametrize(("said", "found"), [(4, "3"), (2, "more than 2")])
def test_a_wrong_length_is_said(said, found):
    assert len(build_pipeline(loader(Sized(3)))) == 3
    with pytest.raises(tf.errors.OpError, match=rf"Expected {said} elements, as len\(\) of Sized said. Found {found}"):
        list(build_pipeline(loader(Sized(said))))


ONES = np.ones(2)
STRINGS = np.array([b"u", b"v"], object)
BFLOATS = np.array([1, 2], tf.bfloat16.as_numpy_dtype)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (np.zeros((2, 3)), np.zeros((2, 3))),
        ([ONES, [1, 2], None], (ONES, np.array([1, 2]))),
        ({"b": tf.constant([1.5, 2]), "a": ["u", "v"]}, {"a": STRINGS, "b": np.array([1.5, 2])}),
        (Pair(ONES, ("u", "v")), Pair(ONES, STRINGS)),
        ((collections.UserDict(x=ONES), [0.5, 2.0]), ({"x": ONES}, np.array([0.5, 2]))),
        ((np.ones((4, 4))[::2, 0].T, np.array(["é", "b"])), (ONES, np.array(["é".encode(), b"b"], object))),
        (BFLOATS, BFLOATS),
    ],
)
def test_batches_of_any_structure(batch, expected):
    (found,) = build_pipeline(lambda: iter([batch])).as_numpy_iterator()
    tf.nest.assert_same_structure(found, expected)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_array_equal(one, other)


def test_ragged_and_sparse_batches():
    batch = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 1], [2, 0]])
    for batches in ([batch], [batch, batch]):
        ragged, sparse = list(build_pipeline(lambda batches=batches: iter(batches)))[-1]
        assert ragged.to_list() == [[1], [2, 3]]
        assert tf.sparse.to_dense(sparse).numpy().tolist() == [[0, 1], [2, 0]]


def test_memory_that_the_loader_uses_again_is_copied():
    room = np.zeros(64 + 16, "int32")
    buffer = room[(-room.ctypes.data % 64) // 4 :][:16]  # which TensorFlow would take over

    def reusing():
        for number in range(6):
            buffer[:] = number
            yield buffer

    found = list(build_pipeline(reusing, augment=per_batch(lambda x: x), prefetch=4))
    assert [int(batch[0]) for batch in found] == [0, 1, 2, 3, 4, 5]


X, Y = np.zeros((2, 1)), np.zeros(2)


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ((X, np.zeros(3)), r"batch 1\[0\] has 2, batch 1\[1\] has 3.*batched=False"),
        ((X, np.float32(1)), r"Found a single value at batch 1\[1\]"),
        ((X, None, Y), r"Found None at batch 1\[1\]. Leave it out"),
        ((X, object()), r"Found a object at batch 1\[1\]"),
        ((X, np.array([{}, 1], object)), r"array of objects at batch 1\[1\]"),
        ((X, np.zeros(2, "datetime64[s]")), r"Found datetime64\[s\] at batch 1\[1\]"),
        (X, r"Expected element\[0\], element\[1\].* Found element in element 1"),
        ((X, np.zeros(2, "int32")), r"Expected float64 of 1 axes at element\[1\].*Found int32"),
    ],
)
def test_what_is_no_batch_is_refused_by_place(second, message):
    with pytest.raises(PipelineError, match=message):
        loader(lambda: iter([(X, Y), second]))


@pytest.mark.parametrize(
    ("third", "message"),
    [
        ((np.zeros((2, 5)), Y), r"Expected shape \(None, 1\) at element\[0\].*Found \(2, 5\) in batch 2"),
        # TensorFlow would cast it.
        ((X, Y.astype("int64")), r"Expected float64 of 1 axes at element\[1\].*Found int64.*in batch 2"),
    ],
)
def test_later_batches_are_like_the_first(third, message):
    with pytest.raises(tf.errors.OpError, match=message):
        list(build_pipeline(lambda: iter([(X, Y), (X, Y), third])))


def test_axes_may_vary_if_the_first_batches_do():
    lengths = [3, 5, 9]
    dataset = build_pipeline(lambda: (np.zeros((2, length)) for length in lengths))
    assert [batch.shape[1] for batch in dataset] == lengths


def test_single_examples_take_all_options():
    def examples():
        for number in range(10):
            yield np.full(3, number), number

    source = loader(examples, batched=False)
    dataset = build_pipeline(source, batch_size=4, shuffle=False, transform=lambda x, y: (x * 2, y), cache="memory")
    assert labels(dataset) == labels(dataset) == EXPECTED
    shuffled = build_pipeline(source, batch_size=5, seed=2)
    assert sorted(number for batch in labels(shuffled) for number in batch) == list(range(10))
    with pytest.raises(PipelineError, match=r"pass loader\(..., batched=False\)"):
        build_pipeline(examples)
    assert len(build_pipeline(loader(Sized(3, (4, 4, 4)), batched=False), batch_size=1)) == 3
    with pytest.raises(UnsupportedError, match="decides what it yields each time"):
        plan_pipeline(source, seed=1).at(1)


NEED_EXAMPLES = [
    *[("batch_size", 256), ("transform", per_batch(lambda x, y: (x, y))), ("cache", "memory"), ("cache", "device")],
    *[("split", 0.5), ("pack", 8), ("pad", "batch"), ("bucket", True), ("remainder", "drop"), ("shuffle", True)],
    ("service", "grpc://localhost:1"),
]


@pytest.mark.parametrize(("option", "value"), NEED_EXAMPLES)
def test_what_needs_examples_is_refused(option, value):
    with pytest.raises(UnsupportedError, match=rf"Found:? {option}=.*What to do: "):
        plan_pipeline(batches, **{option: value})


@pytest.mark.parametrize(
    ("batched", "message"),
    [(True, "divided among 2 processes. Found: batches, which makes"), (False, "the same for each of several")],
)
def test_several_processes_are_refused(monkeypatch, batched, message):
    monkeypatch.setattr(parts, "_place", lambda: (0, 2))
    with pytest.raises(UnsupportedError, match=message):
        plan_pipeline(loader(batches, batched=batched), **({} if batched else {"batch_size": 2}))


def test_what_changes_nothing_is_taken():
    plan = plan_pipeline(batches, cache="auto", remainder="keep", shuffle=False, split=None, prefetch=2, device="CPU:0")
    assert labels(plan.build()) == EXPECTED
    assert "seed 1 holds for `augment` alone" in plan_pipeline(batches, seed=1).stage("order").reason
    with pytest.raises(UnsupportedError, match="Found batches, which decides"):
        plan_pipeline(batches, seed=1).at()


def test_batches_are_no_examples_to_mix_or_write(tmp_path):
    with pytest.raises(UnsupportedError, match="part 2"):
        mix([(np.zeros(8), 1), (batches, 1)], batch_size=2)
    with pytest.raises(UnsupportedError, match="single examples"):
        write_records(batches, tmp_path / "written")


def test_a_source_of_your_own_may_yield_batches():
    lengths = (3, 3, 7)
    spec = tf.TensorSpec((None, None), tf.float64)
    made = [np.full((2, length), length, float) for length in lengths]
    source = Source(
        name="mine",
        dataset=lambda: tf.data.Dataset.from_generator(lambda: iter(made), output_signature=spec),
        batched=True,
    )
    plan = plan_pipeline(source, augment=per_batch(lambda x: x + 1))
    assert [batch.shape[1] for batch in plan.build()] == [3, 3, 7]
    assert [batch.shape[1] for batch in plan_pipeline(source).at(0, 1).build()] == [3, 7]
    shuffled = replace(source, dataset=lambda: source.dataset().shuffle(3))
    with pytest.raises(UnsupportedError, match=r"Found.* in the source"):
        plan_pipeline(shuffled).at(1)
    with pytest.raises(ValueError, match=r"\(batched=True\) without decode.*Received: decode\."):
        replace(source, decode=lambda x: x)
