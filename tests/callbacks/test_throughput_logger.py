import csv
import json
import time

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


class Works(keras.callbacks.Callback):
    """Work of a known length in each step: `fit` waits for it as for the model's."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(self.seconds)


def slow_input(seconds, batches=12):
    """Batches that take this long each, made while the model works on the one before."""

    def nap(x):
        time.sleep(seconds)
        return x

    def wait(x, y):
        return tf.ensure_shape(tf.numpy_function(nap, [x], tf.float32), x.shape), y

    return dataset(8 * batches, 8).map(wait, num_parallel_calls=1).prefetch(1)


def tiny_net(base=keras.Sequential, **options):
    model = base([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return model


def rows(folder):
    return [json.loads(line) for line in (folder / "throughput.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(("input_ms", "work_ms", "low", "high"), [(1, 30, 0, 50), (40, 20, 10, 90), (40, 1, 30, 100)])
def test_the_share_of_waiting_for_input(tmp_path, jit_compile, input_ms, work_ms, low, high):
    logger, work = ThroughputLogger(tmp_path, window_steps=6), Works(work_ms / 1000)
    data = slow_input(input_ms / 1000)
    history = tiny_net(jit_compile=jit_compile).fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[logger, work])
    assert history.history["input_wait_percent"][0] >= low - 40  # that step's compilation is no step's work
    # In the first epoch, batches lie ready that were made while the first step compiled.
    shares = [history.history["input_wait_percent"][1], *(row["input_wait_percent"] for row in rows(tmp_path)[2:])]
    assert len(shares) == 3
    assert all(low <= share <= high for share in shares)


def test_waiting_and_the_model_are_told_apart_inside_the_step():
    def nap(x):
        time.sleep(0.03)
        return x

    class Busy(keras.Sequential):
        def train_step(self, data):
            x, y = data
            return super().train_step((tf.ensure_shape(tf.numpy_function(nap, [x], tf.float32), x.shape), y))

    model = tiny_net(Busy, jit_compile=False)
    quick = model.fit(slow_input(0.001), verbose=0, shuffle=False, callbacks=[ThroughputLogger()])
    slow = model.fit(slow_input(0.06), verbose=0, shuffle=False, callbacks=[ThroughputLogger()])
    shares = [history.history["input_wait_percent"][0] for history in (quick, slow)]
    assert shares[0] + 5 < shares[1] < 90


def test_arrays_and_generators_have_a_share():
    def endless():
        while True:
            time.sleep(0.02)
            yield batch(8)

    arrays = tiny_net().fit(*batch(80), batch_size=8, epochs=2, verbose=0, callbacks=[ThroughputLogger(), Works(0.02)])
    assert max(arrays.history["input_wait_percent"]) < 45  # near 0, but for whatever else the machine does
    # One iterator serves all epochs: what passes between two of them is no step.
    between = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.5))
    generated = tiny_net().fit(
        endless(), steps_per_epoch=12, epochs=2, verbose=0, shuffle=False, callbacks=[ThroughputLogger(), between]
    )
    assert min(generated.history["input_wait_percent"]) > 30


def test_a_step_that_compiles_anew_waits_for_no_input():
    # The last batch is smaller: its step compiles, and takes longer than all others together.
    data = dataset(84, 8)
    model = tiny_net(jit_compile=True)
    history = model.fit(data, verbose=0, shuffle=False, callbacks=[ThroughputLogger(), Works(0.005)]).history
    assert history["input_wait_percent"][0] < 45


def test_more_steps_than_tf_data_keeps_gaps_of():
    class Slows(Works):
        def on_train_batch_end(self, step, logs=None):
            if step < 130:
                super().on_train_batch_end(step)

    data = slow_input(0.004, batches=260)
    history = tiny_net().fit(data, verbose=0, shuffle=False, callbacks=[ThroughputLogger(), Slows(0.008)]).history
    # No wait in the first half, which takes two thirds of the time; then waiting, less what a step of the model takes.
    assert 5 < history["input_wait_percent"][0] < 60


@pytest.mark.parametrize("why", ["steps_per_execution", "autotuning", "eager", "few steps"])
def test_where_it_is_unknown_it_is_absent(tmp_path, why):
    data = dataset(40 if why == "few steps" else 80, 8)
    if why == "autotuning":
        options = tf.data.Options()
        options.autotune.enabled = False
        data = data.with_options(options)
    eager = {"run_eagerly": True, "jit_compile": False} if why == "eager" else {}
    model = tiny_net(steps_per_execution=2 if why == "steps_per_execution" else 1, **eager)
    logger = ThroughputLogger(tmp_path, window_steps=4 if why == "few steps" else 8)
    history = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[logger]).history
    assert "input_wait_percent" not in history
    assert {row["input_wait_percent"] for row in rows(tmp_path)} == {None}


def test_the_iterator_is_let_go_after_an_epoch():
    logger, seen = ThroughputLogger(), []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: seen.append(logger._input._iterator is not None),
        on_epoch_end=lambda epoch, logs: seen.append(logger._input._iterator is None),
    )
    tiny_net().fit(dataset(40, 8), verbose=0, shuffle=False, callbacks=[logger, watch])
    assert seen == [True] * 6
