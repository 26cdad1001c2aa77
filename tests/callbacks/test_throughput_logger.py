import csv
import json

import keras
import pytest
import tensorflow as tf
from models import assert_same_state, batch, small_net, state

from tfopt.callbacks import ThroughputLogger


class Clock:
    """One second for each step: it is read when an epoch begins and when a step ends."""

    def __init__(self, *seconds):
        self.now = 0.0
        self.seconds = list(seconds)

    def __call__(self):
        self.now += self.seconds.pop(0) if self.seconds else 1.0
        return self.now


def dataset(examples, size):
    return tf.data.Dataset.from_tensor_slices(batch(examples)).batch(size)


def fit(logger, examples=40, size=8, model=None, **arguments):
    model = model or small_net()
    return model.fit(dataset(examples, size), verbose=0, shuffle=False, callbacks=[logger], **arguments)


def test_examples_and_step_time_without_the_first_step():
    logger = ThroughputLogger(clock=Clock(0.0, 60.0))
    history = fit(logger, epochs=2)
    assert logger.first_step_seconds == 60.0
    # Five steps of eight examples, a second each; in the first epoch the first step counts neither way.
    assert history.history["step_time_ms"] == [1000.0, 1000.0]
    assert history.history["examples_per_second"] == [32 / 4, 40 / 5]


def test_a_partial_batch_counts_as_what_it_is():
    history = fit(ThroughputLogger(clock=Clock()), examples=20, size=8, epochs=2)
    assert history.history["examples_per_second"] == [12 / 2, 20 / 3]


def test_validation_is_neither_timed_nor_counted():
    history = fit(ThroughputLogger(clock=Clock()), epochs=2, validation_data=dataset(100, 10))
    assert history.history["examples_per_second"] == [8.0, 8.0]


def test_steps_per_execution():
    logger = ThroughputLogger(clock=Clock(0.0, 60.0))
    history = fit(logger, examples=64, size=8, epochs=1, model=small_net(steps_per_execution=4))
    assert history.history["step_time_ms"] == [250.0]
    assert history.history["examples_per_second"] == [32.0]


@pytest.mark.parametrize("steps", [1, 4])
def test_in_a_training_of_one_execution_that_is_all_there_is(steps):
    logger = ThroughputLogger(clock=Clock(0.0, 60.0))
    history = fit(logger, examples=8 * steps, model=small_net(steps_per_execution=steps), epochs=2)
    assert history.history["step_time_ms"] == [60_000.0 / steps, 1000.0 / steps]
    assert history.history["examples_per_second"] == [8 * steps / 60, 8 * steps]


@pytest.mark.parametrize("when", ["on_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize("first", [True, False])
def test_another_callback_that_evaluates_does_not_bend_the_figures(when, first):
    evaluates = keras.callbacks.Callback()
    setattr(evaluates, when, lambda *_, logs=None: evaluates.model.evaluate(*batch(600), batch_size=300, verbose=0))
    logger = ThroughputLogger(clock=Clock())
    callbacks = [evaluates, logger] if first else [logger, evaluates]
    data = dataset(40, 8)
    history = small_net().fit(data, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
    if not (first and when == "on_train_batch_end"):  # else the first batch's size is not to be had
        assert history["examples_per_second"] == [8.0, 8.0]


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_data_of_unknown_length():
    unknown = dataset(20, 8).filter(lambda x, y: True)
    logger = ThroughputLogger(clock=Clock())
    history = small_net().fit(unknown, epochs=2, verbose=0, shuffle=False, callbacks=[logger]).history
    assert history["examples_per_second"] == [12 / 2, 20 / 3]


def test_a_train_step_without_a_loss_tracker_has_no_examples():
    class Custom(keras.Sequential):
        def train_step(self, data):
            return {"x": tf.constant(1.0)}

    model = Custom([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(ThroughputLogger(clock=Clock()), model=model)
    assert history.history["step_time_ms"] == [1000.0]
    assert "examples_per_second" not in history.history


def test_a_row_for_each_window(tmp_path):
    logger = ThroughputLogger(tmp_path, window_steps=2, clock=Clock(0.0, 60.0))
    fit(logger, epochs=2)
    with open(tmp_path / "throughput.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("0", "5"), ("1", "2"), ("1", "4"), ("1", "5")]
    assert {row["step_time_ms"] for row in rows} == {"1000.0"}
    assert {row["examples_per_second"] for row in rows} == {"8.0"}
    objects = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [row["step"] for row in objects] == [3, 5, 2, 4, 5]


def test_a_window_spans_epochs_and_the_rest_is_written_at_the_end(tmp_path):
    fit(ThroughputLogger(tmp_path, window_steps=8, clock=Clock(0.0, 60.0)), epochs=3)
    objects = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in objects] == [(1, 4), (2, 5)]


def test_training_is_the_same_with_it(tmp_path):
    plain, logged = small_net(), small_net()
    plain.fit(dataset(40, 8), epochs=2, verbose=0, shuffle=False)
    fit(ThroughputLogger(tmp_path), epochs=2, model=logged)
    assert_same_state(state(plain), state(logged))


def test_it_can_be_fitted_with_again_after_an_exception(tmp_path):
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError

    logger = ThroughputLogger(tmp_path, window_steps=1)
    model = small_net()
    with pytest.raises(RuntimeError):
        model.fit(dataset(40, 8), verbose=0, shuffle=False, callbacks=[logger, Fails()])
    history = fit(logger, model=model)
    assert "examples_per_second" in history.history
    assert len((tmp_path / "throughput.jsonl").read_text().splitlines()) == 8


def test_a_keras_logger_before_it_is_warned_of(tmp_path):
    csv_logger = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    model = small_net()
    with pytest.warns(UserWarning, match="Expected ThroughputLogger before CSVLogger"):
        model.fit(dataset(40, 8), verbose=0, shuffle=False, callbacks=[csv_logger, ThroughputLogger()])
    assert "step_time_ms" not in (tmp_path / "log.csv").read_text()
    model.fit(dataset(40, 8), verbose=0, shuffle=False, callbacks=[ThroughputLogger(), csv_logger])
    assert "step_time_ms" in (tmp_path / "log.csv").read_text()


def test_bad_arguments():
    with pytest.raises(ValueError, match="window_steps"):
        ThroughputLogger(window_steps=0)
    with pytest.raises(ValueError, match=r"Received: 'cvs'\. Did you mean 'csv'\?"):
        ThroughputLogger(formats=("cvs",))
    with pytest.raises(ValueError, match="local folder"):
        ThroughputLogger("gs://bucket/logs")
    with pytest.raises(ValueError, match="which is a file"):
        ThroughputLogger(__file__)
