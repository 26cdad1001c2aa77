"""What workers' readings are judged to be, without processes."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfopt.distribute.data_check.reading import Reading, read
from tfopt.distribute.data_check.samples import differ, digest, sample, sample_source
from tfopt.distribute.data_check.verdict import judge_epoch, judge_start
from tfopt.pipelines import Source, arrays, mix
from tfopt.pipelines.sources import parts

ROWS = sample((np.arange(40.0).reshape(20, 2), np.arange(20)))
OTHERS = sample((np.arange(1.0, 41.0).reshape(20, 2), np.arange(1, 21)))
AUGMENTED = [OTHERS[0], ROWS[1]]


def reading(**values):
    return Reading(**{"steps": 4, "examples": 64, "rows": ROWS, **values})


def test_the_same_data_are_right():
    assert not judge_start([reading(), reading(), reading()]).text


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        ({"rows": OTHERS}, True),
        ({"rows": AUGMENTED}, False),  # noise on the inputs, or sorted labels
        ({"rows": OTHERS, "endless": True}, False),
        ({"stages": [("take", [32])]}, True),
        ({"examples": 63}, True),
    ],
)
def test_other_data_are_refused_if_that_is_certain(other, refused):
    first = reading(endless=other.get("endless", False))
    verdict = judge_start([first, first, reading(**other)])
    assert "worker 2" in verdict.text
    assert verdict.refused == refused


def test_a_pydataset_that_augments_its_inputs_is_right():
    first = reading(repeatable=False)
    assert not judge_start([first, reading(repeatable=False, rows=AUGMENTED)]).text
    assert judge_start([first, reading(repeatable=False, rows=OTHERS)]).unless_random


def test_sources_that_build_pipeline_divides_are_called_so():
    first = reading(by_pipeline=True)
    for other in ({"rows": OTHERS}, {"examples": 63}, {"stages": [("shuffle", [1])]}, {"steps": 5}):
        verdict = judge_start([first, reading(by_pipeline=True, **other)])
        assert verdict.refused
        assert "What to do: pass build_pipeline the same whole source" in verdict.text
    assert "in worker 1 only" in judge_start([reading(), reading(by_pipeline=True, stages=[("batch_size", [16])])]).text


def mixture_of(monkeypatch, worker, *numbers):
    """What a worker says of a mixture of these parts."""
    monkeypatch.setattr(parts, "_place", lambda: (worker, 2))
    plan = mix([(each, 1) for each in numbers], batch_size=8)
    data = SimpleNamespace(_dataset=SimpleNamespace(**{parts.IN_PARTS: plan.stage("workers").part}))
    return read(SimpleNamespace(data_adapter=data, num_batches=4, steps_per_epoch=None))


def test_each_part_of_a_mixture_must_be_the_same(monkeypatch):
    numbers, more = np.arange(40), np.arange(100, 140)
    first = mixture_of(monkeypatch, 0, numbers, more)
    assert not judge_start([first, mixture_of(monkeypatch, 1, numbers, more)]).text
    verdict = judge_start([first, mixture_of(monkeypatch, 1, numbers, more + 1)])
    assert verdict.refused
    assert "What to do: pass build_pipeline the same whole source" in verdict.text


def test_the_same_first_batch_is_refused_only_of_data_that_tensorflow_does_not_divide():
    own, divided = reading(divided=False, first="a1"), reading(first="a1")
    assert "workers 0 and 2" in judge_start([own, reading(divided=False, first="b2"), own]).text
    assert not judge_start([divided, divided]).text
    assert not judge_start([reading(divided=False), reading(divided=False)]).text  # a hash that says nothing


@pytest.mark.parametrize(
    ("values", "counted", "text"),
    [
        ({}, [32, 32], ""),
        ({}, [16, 16], "Expected 64 examples in the epoch of all workers together. Found: 32 (16 in worker 0, 16"),
        ({"divided": False}, [64, 64], ""),
        ({"divided": False}, [32, 32], "Expected 128"),
        ({"examples": None}, [1, 1], ""),
        ({"certain": False, "batch_size": 16, "in_step": 16}, [64, 64], ""),  # two crops of each image
        ({"certain": False, "batch_size": 16, "in_step": 8}, [26, 26], "Expected 64"),
    ],
)
def test_an_epoch_must_count_each_example_once(values, counted, text):
    verdict = judge_epoch([reading(**values)] * 2, counted)
    assert verdict.text.startswith(text)
    assert bool(verdict.text) == bool(text)
    assert not text or verdict.refused == values.get("certain", True)


def test_samples_agree_despite_rounding_and_tell_neighbours_apart():
    x = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    assert differ(sample(x), sample(x * np.float32(1 + 1e-7))) == [False]
    assert differ(sample(x[::2]), sample(x[1::2])) == [True]
    assert differ(sample(np.arange(10**9, 10**9 + 50)), sample(np.arange(10**9 + 1, 10**9 + 51))) == [True]
    assert differ(sample(np.zeros((9, 2))), sample(np.zeros((9, 2)))) == []  # says nothing
    paths = [np.array([f"/host{host}/{name}.png" for name in "abc"], object) for host in range(2)]
    assert differ(sample(paths[0]), sample(paths[1])) == [False]


SQUARES = {"name": "squares", "dataset": lambda: tf.data.Dataset.range(1000), "decode": lambda number: number * number}


@pytest.mark.parametrize(
    ("source", "examples"),
    [
        (arrays(np.arange(1000) ** 2), np.linspace(0, 999, 16).astype(int) ** 2),
        (Source(**SQUARES, shuffled=lambda seed: tf.data.Dataset.range(1000 * seed + 999, 0, -1)), None),
        (Source(**SQUARES), np.arange(16) ** 2),
    ],
)
def test_a_source_is_looked_at_where_it_can_be_read(source, examples):
    expected = np.arange(999, 999 - 128, -8) ** 2 if examples is None else examples
    assert sample_source(source, 1000) == sample(expected)


def test_a_batch_in_which_an_example_occurs_twice_has_no_digest():
    x = np.arange(6.0).reshape(3, 2)
    assert digest([(x, x)]) == digest([(x, x)]) != digest([(x, x + 1)])
    assert digest([(x[:2], None), (x[2:], None)]) == digest([(x, None)])
    assert digest([x[[0, 1, 0]]]) == digest([x[:1]]) == ""


def test_what_numpy_cannot_read_says_nothing():
    ragged = tf.ragged.constant([[1], [2, 3]])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2]])
    tensors = [tf.constant(["a", "b"]), tf.constant([1.0, 2.0])]
    assert [bool(rows) for rows in sample([ragged, sparse, *tensors, "text"])] == [True, False, True, True, False]
    stored = tf.data.Dataset.from_tensor_slices(ragged)._tensors
    assert sample(stored) == [[]]
    assert digest([(sparse, tf.constant([1, 2]))]) == ""
