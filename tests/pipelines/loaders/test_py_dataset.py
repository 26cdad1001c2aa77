import multiprocessing
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.errors import PipelineError, UnsupportedError
from tfopt.pipelines import build_pipeline, loader, per_batch, plan_pipeline

PARALLEL = [{}, {"workers": 3, "max_queue_size": 2}]
PROCESSES = {"workers": 2, "use_multiprocessing": True}
PARALLEL_KINDS = [{"workers": 2}, pytest.param(PROCESSES, marks=pytest.mark.slow)]
FORKS = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


def batch_of(index, rows=4):
    draws = np.random.default_rng(index)
    return draws.random((rows, 3), "float32"), draws.random((rows, 1), "float32")


class Numbered(keras.utils.PyDataset):
    """Five batches that depend on their index alone, the last one smaller."""

    steps = 5

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        return batch_of(index, rows=4 if index < self.steps - 1 else 2)


class Reshuffled(keras.utils.PyDataset):
    """Views of an array that is shuffled in place between epochs, and what is called."""

    def __init__(self, **keywords):
        super().__init__(**keywords)
        # Aligned as TensorFlow wants it, so that it takes over the memory.
        room = np.zeros(64 + 16, "float32")
        start = (-room.ctypes.data % 64) // 4
        self.x = room[start : start + 64].reshape(4, 16)
        self.x += np.arange(4)[:, None]
        self.draws, self.calls = np.random.default_rng(0), []

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.x[index : index + 1]

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")
        self.draws.shuffle(self.x)


def firsts(dataset):
    return [float(tf.nest.flatten(batch)[0][0, 0]) for batch in dataset]


def same(dataset, indices):
    found = list(dataset.as_numpy_iterator())
    assert len(found) == len(indices)
    for batch, index in zip(found, indices, strict=True):
        for part, expected in zip(batch, Numbered()[index], strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.mark.parametrize("keywords", PARALLEL)
def test_batches_come_in_their_order(keywords):
    dataset = build_pipeline(Numbered(**keywords), shuffle=False)
    for _ in range(2):
        same(dataset, range(5))
    assert len(dataset) == 5
    assert dataset.element_spec[0] == tf.TensorSpec((None, 3), tf.float32)


def test_a_shuffle_draws_an_order_of_batches_that_a_position_finds_again():
    plan = plan_pipeline(Numbered(workers=2), seed=1)
    truth = {float(Numbered()[index][0][0, 0]): index for index in range(5)}
    dataset = plan.build()
    epochs = [[truth[value] for value in firsts(dataset)] for _ in range(3)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)
    assert epochs[0] != epochs[1]
    moved = plan.at(1, 2).build()
    same(moved, epochs[1][2:])
    same(moved, epochs[2])


def test_a_position_reads_nothing_before_it():
    read = []

    class Watched(Numbered):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    plan = plan_pipeline(Watched(), training=False).at(3, 3)
    read.clear()
    same(plan.build(), [3, 4])
    assert read == [3, 4]


@pytest.mark.parametrize("keywords", PARALLEL)
def test_epochs_end_once_and_leave_earlier_batches_as_they_were(keywords):
    data = Reshuffled(**keywords)
    truth = Reshuffled()
    dataset = build_pipeline(data, shuffle=False)
    for _ in range(3):
        found = list(dataset)  # all are held while `on_epoch_end` shuffles
        assert firsts(found) == truth.x[:, 0].tolist()
        truth.on_epoch_end()
    assert data.calls == ["begin", "end"] * 3
    next(iter(dataset))
    assert data.calls == ["begin", "end"] * 4


def test_batches_that_change_between_epochs_have_no_position():
    plan = plan_pipeline(Reshuffled(), seed=1)
    with pytest.raises(UnsupportedError, match="Found its on_epoch_begin or on_epoch_end"):
        plan.at(1)
    assert "no position" in plan.stage("order").reason


def workers():
    """Threads and processes that compute batches."""
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("tfopt-loader")]
    return threads + multiprocessing.active_children()


@FORKS
@pytest.mark.parametrize("keywords", PARALLEL_KINDS)
def test_an_epoch_cut_short_leaves_no_worker(keywords):
    plan = plan_pipeline(Numbered(**keywords), training=False)
    same(plan.build(), range(5))
    same(plan.at(0, 3).build(), [3, 4])
    iterator = iter(plan.build())
    next(iterator)
    assert workers()
    del iterator
    assert not workers()


class Failing(Numbered):
    def __getitem__(self, index):
        if index == 3:
            raise LookupError(f"no picture {index}")
        return super().__getitem__(index)


@FORKS
@pytest.mark.parametrize("keywords", PARALLEL_KINDS)
def test_an_error_keeps_its_type_and_traceback_and_no_worker_is_left(keywords):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.OpError, match=r"(?s)LookupError: no picture 3.*in __getitem__.*raise LookupError"):
        model.fit(build_pipeline(Failing(**keywords), shuffle=False), verbose=0)
    assert not workers()


def test_an_endless_one_is_trained_for_its_steps():
    class Endless(Numbered):
        num_batches = None

        def __getitem__(self, index):
            return batch_of(index)

    dataset = build_pipeline(Endless(workers=2))
    assert int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(dataset, steps_per_epoch=3, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 6
    same_first = [batch[0].numpy() for batch in dataset.take(7)][6]
    np.testing.assert_array_equal(same_first, batch_of(6)[0])


def test_a_length_that_changes_is_refused():
    data = Numbered()
    dataset = build_pipeline(data, training=False)
    data.steps = 4
    with pytest.raises(tf.errors.OpError, match=r"Expected 5 elements, as len\(\) of Numbered said. Found 4 now"):
        list(dataset)


def test_augment_takes_batches_and_draws_from_the_seed():
    def noisy(x, y, seed):
        return x + tf.random.stateless_uniform((), seed), y

    plan = plan_pipeline(Numbered(), seed=4, shuffle=False, augment=per_batch(noisy))
    first, second = (firsts(plan.build()) for _ in range(2))
    plain = [float(Numbered()[index][0][0, 0]) for index in range(5)]
    added = np.subtract(first, plain)
    assert first == second
    assert len(set(added.round(5).tolist())) == 5
    assert firsts(plan.at(0, 2).build()) == first[2:]
    with pytest.raises(UnsupportedError, match=r"pass per_batch\(.*noisy\)"):
        plan_pipeline(Numbered(), augment=noisy)


def test_the_plan_says_what_is_not_promised():
    plan = plan_pipeline(Numbered(workers=3), seed=1)
    values = plan.to_dict()
    assert (values["source"], values["count"], values["steps_per_epoch"], values["cache"]) == ("Numbered", 5, 5, None)
    text = " ".join(str(plan).split())
    assert "5 batches, in another order in each epoch; read ahead by 3 threads, up to 10 batches" in text
    assert "whole batches of a loader are not cached" in text
    assert "several processes cannot divide them" in text
    assert "seed 1 holds for the order of batches, and `augment`; what the loader draws itself follows its own" in text


def test_it_is_no_source_of_examples():
    with pytest.raises(ValueError, match="batched=False for Numbered"):
        loader(Numbered(), batched=False)
    nothing = Numbered()
    nothing.steps = 0
    with pytest.raises(PipelineError, match="at least one element of Numbered"):
        loader(nothing)
