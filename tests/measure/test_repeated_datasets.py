"""Datasets that nothing may follow are measured as they are: the same stages, in epochs."""

import itertools

import keras
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state

from tfopt import fit
from tfopt.measure import fit_time, one_batch, step_time
from tfopt.model.batches import ends_on_device, first_batch, is_endless, repeated
from tfopt.pipelines import build_pipeline


def pipeline(examples=24, **options):
    """Batches of eight; three of them."""
    return build_pipeline(batch(examples), batch_size=8, **options)


def plain_net(**options):
    return small_net(jit_compile=False, **options)


@pytest.fixture
def fitted(monkeypatch):
    """What `fit` is called with: (dataset, options)."""
    seen, stock = [], plain_net().__class__.fit

    def noted(self, dataset, **options):
        seen.append((dataset, options))
        return stock(self, dataset, **options)

    monkeypatch.setattr("keras.Model.fit", noted)
    return seen


def test_a_dataset_is_repeated():
    fed = repeated(pipeline(device=None))
    assert is_endless(fed)
    assert len(list(itertools.islice(iter(fed), 7))) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: pipeline(device="CPU:0"),
        lambda: pipeline(device="CPU:0").prefetch(2),
        lambda: pipeline(cache="device"),
        lambda: tf.data.Dataset.range(3).repeat(),
    ],
    ids=["copy", "copy, prefetch", "stage", "endless"],
)
def test_nothing_is_put_behind(make):
    dataset = make()
    assert repeated(dataset) is dataset


def test_what_follows_a_copy_is_no_longer_on_the_device():
    dataset = pipeline(device="CPU:0")
    assert ends_on_device(dataset)
    assert not ends_on_device(dataset.map(lambda *parts: parts))
    assert not ends_on_device(pipeline(device=None))


@pytest.mark.slow
def test_a_copy_to_the_device_stays_the_last_stage(fitted):
    net, dataset = plain_net(), pipeline(device="CPU:0")
    step_time(net, dataset, steps=1)  # builds the metrics
    before = state(net)
    times = fit_time(net, dataset, steps=20, warmup=2)
    assert (len(times.samples_ms), times.steps_per_sample, times.examples_per_step) == (10, 2, 8)
    ((given, options),) = fitted
    assert given is dataset
    assert "steps_per_epoch" not in options
    assert_same_state(state(net), before)


@pytest.mark.slow
def test_epochs_end_with_the_last_step():
    class Counting(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.steps = self.epochs = 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs += 1

        def on_train_batch_end(self, step, logs=None):
            self.steps += 1

    counting = Counting()
    fit_time(plain_net(), pipeline(device="CPU:0"), steps=10, warmup=2, callbacks=[counting])
    assert (counting.steps, counting.epochs) == (1 + 2 + 10, 5)


@pytest.mark.slow
def test_an_endless_dataset_is_fed_as_it_is(fitted):
    dataset = pipeline(device=None).repeat()
    fit_time(plain_net(), dataset, steps=4, warmup=1)
    ((given, options),) = fitted
    assert given is dataset
    assert options["steps_per_epoch"] == 6


@pytest.mark.slow
def test_a_device_stage_gives_its_batches():
    net, dataset = plain_net(), pipeline(cache="device", shuffle=False)
    for found, expected in zip(first_batch(net, dataset), one_batch(pipeline(shuffle=False)), strict=True):
        assert found.numpy().tobytes() == expected.numpy().tobytes()
    assert step_time(net, dataset, steps=2).examples_per_step == 8
    fit.overlap(net)
    before = state(net)
    assert fit_time(net, dataset, steps=6, warmup=1).examples_per_step == 8
    assert_same_state(state(net), before)
    fit.undo(net)


@pytest.mark.slow
def test_several_steps_an_execution():
    assert len(fit_time(plain_net(steps_per_execution=3), pipeline(device="CPU:0"), steps=10).samples_ms) == 10
    with pytest.raises(ValueError, match=r"Expected a multiple of steps_per_execution=2 batches .* Found 3\. Build"):
        fit_time(plain_net(steps_per_execution=2), pipeline(device="CPU:0"))
