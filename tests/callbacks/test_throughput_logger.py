import csv
import json
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from clock import Clock as Stopwatch
from models import batch
from throughput import Clock, dataset, rows, tiny_net

from tfopt import fit as tfopt_fit
from tfopt.callbacks import ThroughputLogger
from tfopt.fit.launching import overlap_of
from tfopt.warn import forget_warnings


def fit(logger, examples=40, size=8, model=None, **arguments):
    arguments = {"verbose": 0, "shuffle": False, "callbacks": [logger]} | arguments
    return (model or tiny_net()).fit(dataset(examples, size), **arguments).history


@pytest.mark.parametrize(
    ("options", "steps_per_execution", "step_ms", "rates"),
    [
        # Five steps of eight examples, a second each; in the first epoch the first step counts neither way.
        ({}, 1, [1000, 1000], [32 / 4, 40 / 5]),
        ({"examples": 20}, 1, [1000, 1000], [12 / 2, 20 / 3]),
        ({"validation_data": batch(100)}, 1, [1000, 1000], [8, 8]),
        ({"examples": 64}, 4, [250, 250], [32, 32]),
        # One execution is all there is.
        ({"examples": 8}, 1, [60_000, 1000], [8 / 60, 8]),
        ({"examples": 32}, 4, [60_000 / 4, 1000 / 4], [32 / 60, 32]),
    ],
)
def test_examples_and_step_time_without_the_first_step(options, steps_per_execution, step_ms, rates, set_clock):
    set_clock(Clock(0.0, 60.0), ThroughputLogger)
    logger = ThroughputLogger()
    history = fit(logger, model=tiny_net(steps_per_execution=steps_per_execution), epochs=2, **options)
    assert logger.first_step_seconds == 60.0
    assert history["step_time_ms"] == step_ms
    assert history["examples_per_second"] == rates


@pytest.mark.slow
@pytest.mark.parametrize(("window_steps", "steps_per_execution"), [(30, 1), (30, 4), (1000, 1)])
def test_steps_counted_many_at_once_give_the_same(tmp_path, monkeypatch, window_steps, steps_per_execution, set_clock):
    waiting = []  # executions that are not counted

    def training(folder):
        """The files' rows and the epochs' figures of 260 steps of about a millisecond."""
        # FLOPs are counted beside the training, and the rows before are without.
        set_clock(Milliseconds(), ThroughputLogger)
        logger = ThroughputLogger(folder, window_steps=window_steps, flops_per_example=1)
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_, logs: waiting.append(len(logger._uncounted))
        )
        keras.utils.set_random_seed(0)
        model = tiny_net(steps_per_execution=steps_per_execution)
        data = dataset(130 * 8, 8)
        found = model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[logger, look]).history
        listed = [found, *rows(folder)]
        volatile = {"run", "time_seconds", "elapsed_seconds", "input_wait_percent"}
        return [{key: row[key] for key in row if key not in volatile} for row in listed]

    many = training(tmp_path / "many")
    assert 20 // steps_per_execution < max(waiting) <= 100
    waiting.clear()
    monkeypatch.setattr("tfopt.callbacks.throughput.input_wait.InputWait.room", 1)
    assert training(tmp_path / "one") == many
    assert set(waiting) == {0, steps_per_execution == 1}, "the last one, until its wait is known"


class Milliseconds:
    """A clock on which each look comes about a millisecond after the one before."""

    def __init__(self):
        self._random, self._now = np.random.default_rng(0), 0.0

    def __call__(self):
        self._now += self._random.uniform(0.5e-3, 2e-3)
        return self._now


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "first"), [("on_epoch_end", True), ("on_epoch_end", False), ("on_train_batch_end", False)]
)
def test_another_callback_that_evaluates_does_not_bend_the_figures(when, first, set_clock):
    evaluates = keras.callbacks.Callback()
    setattr(evaluates, when, lambda *_, logs=None: evaluates.model.evaluate(*batch(600), batch_size=300, verbose=0))
    set_clock(Clock(), ThroughputLogger)
    logger = ThroughputLogger()
    history = fit(logger, epochs=2, callbacks=[evaluates, logger] if first else [logger, evaluates])
    assert history["examples_per_second"] == [8.0, 8.0]


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_data_of_unknown_length(set_clock):
    unknown = dataset(20, 8).filter(lambda x, y: True)
    set_clock(Clock(), ThroughputLogger)
    logger = ThroughputLogger()
    history = tiny_net().fit(unknown, epochs=2, verbose=0, shuffle=False, callbacks=[logger]).history
    assert history["examples_per_second"] == [12 / 2, 20 / 3]
    history = tiny_net().fit(unknown, verbose=0, shuffle=False, validation_data=unknown, callbacks=[logger]).history
    assert history["examples_per_second"] == [12 / 2]


def test_a_train_step_without_a_loss_tracker_has_no_examples_and_it_is_said_once(caplog, set_clock):
    class Custom(keras.Sequential):
        def train_step(self, data):
            return {"x": tf.constant(1.0)}

    forget_warnings()
    model = Custom([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(1)], name="custom")
    model.compile("sgd", "mse")
    set_clock(Clock(), ThroughputLogger)
    history = fit(ThroughputLogger(), model=model)
    assert history["step_time_ms"] == [1000.0]
    assert "examples_per_second" not in history
    set_clock(Clock(), ThroughputLogger)
    fit(ThroughputLogger(), model=model)
    assert caplog.text.count("the examples of 'custom'") == 1
    caplog.clear()
    set_clock(Clock(), ThroughputLogger)
    fit(ThroughputLogger(examples_per_step=4), model=model)
    assert "examples" not in caplog.text


def test_a_row_for_each_window(tmp_path, set_clock):
    set_clock(Clock(0.0, 60.0), ThroughputLogger)
    logger = ThroughputLogger(tmp_path, window_steps=2)
    fit(logger, epochs=2)
    with open(tmp_path / "throughput.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["epoch"], row["step"]) for row in rows] == [
        ("0", "3"),
        ("0", "5"),
        ("1", "7"),
        ("1", "9"),
        ("1", "10"),
    ]
    assert {row["step_time_ms"] for row in rows} == {"1000.0"}
    assert {row["examples_per_second"] for row in rows} == {"8.0"}
    objects = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [row["step"] for row in objects] == [3, 5, 7, 9, 10]


def test_a_window_spans_epochs_and_the_rest_is_written_at_the_end(tmp_path, set_clock):
    set_clock(Clock(0.0, 60.0), ThroughputLogger)
    fit(ThroughputLogger(tmp_path, window_steps=8), epochs=3)
    objects = [json.loads(line) for line in (tmp_path / "throughput.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["step"]) for row in objects] == [(1, 9), (2, 15)]


def test_percentiles_of_all_steps_of_an_epoch(tmp_path, set_clock):
    # Long steps at the beginning, which the last rows know nothing of.
    seconds = [*np.linspace(5.0, 9.0, 30), *np.random.default_rng(0).lognormal(-4, 0.3, 370)]
    set_clock(Clock(0.0, 60.0, *seconds), ThroughputLogger)
    logger = ThroughputLogger(tmp_path, window_steps=50)
    history = fit(logger, examples=401, size=1)
    found = [history[f"step_time_{name}ms"][0] for name in ("", "p95_", "p99_")]
    assert found == pytest.approx(1000 * np.percentile(seconds, (50, 95, 99)), rel=0.01)
    last = rows(tmp_path)[-1]
    assert last["step_time_p99_ms"] == pytest.approx(1000 * np.percentile(seconds[-last["window_steps"] :], 99))
    assert (logger.step_times.count, logger.step_times.total) == (400, pytest.approx(sum(seconds)))


def test_the_first_step_is_in_the_logs_of_its_epoch_alone(set_clock):
    seen = []
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs.get("first_step_seconds")))
    set_clock(Clock(0.0, 60.0), ThroughputLogger)
    logger = ThroughputLogger()
    fit(logger, examples=16, epochs=2, callbacks=[logger, look])
    assert seen == [60.0, None]


class Takes(keras.callbacks.Callback):
    """Moves a clock: what the first step, each other one, a validation and the callbacks behind take."""

    def __init__(self, clock, first=60.0, step=2.0, validation=0.0, behind=0.0):
        super().__init__()
        self.clock, self.first, self.step, self.validation, self.behind = clock, first, step, validation, behind

    def on_train_batch_begin(self, batch, logs=None):
        self.clock.now += self.first
        self.first = self.step

    def on_test_end(self, logs=None):
        self.clock.now += self.validation

    def on_epoch_end(self, epoch, logs=None):
        self.clock.now += self.behind


class Told:
    """What a logger's listeners are told."""

    def __init__(self, logger):
        self.rows = []
        logger.listeners.add(self.take)

    def take(self, row):
        self.rows.append(row)


def test_the_time_that_is_left_takes_in_validation_once_it_was_seen(set_clock):
    clock = Stopwatch(0.0)
    set_clock(clock, ThroughputLogger)
    logger, takes = ThroughputLogger(), Takes(clock, validation=7.0, behind=3.0)
    told = Told(logger)
    history = fit(logger, epochs=3, validation_data=batch(8), callbacks=[logger, takes])
    # The callbacks behind are seen when the next epoch begins: two ends of 7 s and one of 3 s.
    assert history["eta_seconds"] == [2 * (5 * 2 + 7), 5 * 2 + (7 + 7 + 3) / 2, 0]
    # After two of fifteen steps, and before any validation.
    assert told.rows[0]["eta_seconds"] == 13 * 2


@pytest.mark.filterwarnings("ignore:.*ran out of data")
def test_no_time_is_left_to_tell_where_the_number_of_steps_is_unknown(set_clock):
    clock = Stopwatch(0.0)
    set_clock(clock, ThroughputLogger)
    logger, takes = ThroughputLogger(), Takes(clock)
    told = Told(logger)
    unknown = dataset(24, 8).filter(lambda x, y: True)
    history = tiny_net().fit(unknown, epochs=2, verbose=0, shuffle=False, callbacks=[logger, takes]).history
    by_place = {(row["epoch"], row["step"]): row["eta_seconds"] for row in told.rows}
    assert by_place[0, 2] is None
    # Keras begins a fourth step, which finds no data: the end of an epoch takes 2 s.
    assert history["eta_seconds"] == [3 * 2 + 2, 0]
    # The optimizer counts the step without data, too: on a GPU only if it is quicker than the end of the data.
    assert by_place[1, 6] in (2 + 2, *([2] if tf.config.list_physical_devices("GPU") else []))


def test_operations_and_their_share_of_the_peak(set_clock):
    set_clock(Clock(), ThroughputLogger)
    logger = ThroughputLogger(flops_per_example=1e9, peak_tflops=2)
    history = fit(logger, epochs=2)
    # Eight examples a second.
    assert history["model_tflops_per_second"] == pytest.approx([0.008, 0.008])
    assert history["mfu_percent"] == pytest.approx([0.4, 0.4])


def test_operations_are_counted_and_without_a_peak_they_have_no_share(tmp_path, fake_nvml, set_clock):
    set_clock(Clock(), ThroughputLogger)
    logger = ThroughputLogger(tmp_path, window_steps=2)
    history = fit(logger)
    assert logger.flops_per_example == 4 * 64  # of a single layer: forward, and the gradient of its kernel
    assert logger.peak_tflops is None
    assert history["model_tflops_per_second"] == pytest.approx([8 * 4 * 64 / 1e12])
    assert "mfu_percent" not in history
    assert {row["mfu_percent"] for row in rows(tmp_path)} == {None}
    assert rows(tmp_path)[-1]["model_tflops_per_second"] == pytest.approx(8 * 4 * 64 / 1e12)


def test_what_cannot_be_counted_is_named_once_and_survived(caplog):
    class Own(keras.layers.Layer):
        def call(self, inputs):
            values = tf.numpy_function(lambda values: values @ values.T, [inputs], tf.float32)
            return tf.ensure_shape(values, (8, 8))

        def compute_output_shape(self, shape):
            return 8, 8

    forget_warnings()
    stack = [keras.layers.Flatten(), Own(name="own"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((8, 8, 1), batch_size=8), *stack])
    model.compile("sgd", "mse", jit_compile=False)
    with caplog.at_level(logging.WARNING, "tfopt"):
        for _ in range(2):
            history = fit(ThroughputLogger(), model=model)
    (record,) = caplog.records
    assert "own_1/PyFunc (" in record.message
    assert "pass ThroughputLogger(flops_per_example=…)" in record.message
    assert "model_tflops_per_second" not in history
    assert "examples_per_second" in history


def test_listeners_are_told_once_a_second_and_at_the_end_of_an_epoch(tmp_path, set_clock):
    clock = Stopwatch(0.0)
    set_clock(clock, ThroughputLogger)
    logger, takes = ThroughputLogger(tmp_path, window_steps=1), Takes(clock, step=0.4)
    told = Told(logger)
    fit(logger, epochs=2)  # the clock stands still: only the ends of epochs
    assert [(row["epoch"], row["step"]) for row in told.rows] == [(0, 5), (1, 10)]
    told.rows.clear()
    history = fit(logger, examples=64, epochs=2, callbacks=[takes, logger])
    # The first step ends at 60 s; three more take over a second.
    assert [(row["epoch"], row["step"]) for row in told.rows] == [(0, 2), (0, 5), (0, 8), (1, 11), (1, 14), (1, 16)]
    assert {round(row["step_time_ms"]) for row in told.rows} == {400}
    assert {round(row["examples_per_second"]) for row in told.rows} == {20}
    assert told.rows[0].keys() == rows(tmp_path)[0].keys()
    assert "step_time_ms" in history


class Device:
    """Stands in for the bound on steps in flight: launching takes 1 s, each step 10 s on the device."""

    def __init__(self, clock, every=4):
        self.clock, self.waits_every = clock, every
        self.done_at, self.unmarked, self.marks = 0.0, 0, []

    def launched(self, outputs):
        self.clock.now += 1.0
        self.done_at = max(self.done_at, self.clock.now) + 10.0
        self.unmarked += 1
        if self.unmarked == self.waits_every:
            self.unmarked = 0
            self.marks.append(self.done_at)
            if len(self.marks) == 2:
                self.clock.now = max(self.clock.now, self.marks.pop(0))

    def wait(self, *_):
        self.clock.now = max(self.clock.now, self.done_at)


@pytest.mark.parametrize(("steps_per_execution", "every"), [(1, 4), (2, 4), (3, 4)])
def test_the_pace_of_steps_launched_ahead(monkeypatch, steps_per_execution, every, set_clock):
    clock = Stopwatch(0.0)
    device = Device(clock, every)
    model = tfopt_fit.overlap(tiny_net(jit_compile=False, steps_per_execution=steps_per_execution))
    overlap_of(model).in_flight = device
    counted = []
    monkeypatch.setattr(
        "tfopt.callbacks.shared.running_fit.count_examples", lambda model: device.wait() or counted.append(1) or 0.0
    )
    set_clock(clock, ThroughputLogger)
    logger = ThroughputLogger()
    history = model.fit(*batch(480), batch_size=4, epochs=2, verbose=0, callbacks=[logger]).history
    assert history["step_time_ms"] == [10_000.0, 10_000.0]
    assert history["step_time_p95_ms"] == [10_000.0, 10_000.0]
    # The sum holds the wait at the epoch's end: 120 steps of the device, and the launch of the first.
    assert logger._steps.seconds == 1201.0
    # No time of the first step is the second's: its end is waited for.
    assert logger.first_step_seconds == 1 + 10 * steps_per_execution
    assert len(counted) == 3


def test_a_list_of_callbacks_that_tells_nothing_of_the_fit(set_clock):
    set_clock(Clock(), ThroughputLogger)
    model, logger = tiny_net(), ThroughputLogger()
    callbacks = keras.callbacks.CallbackList([logger], add_history=True, model=model)
    history = model.fit(*batch(40), batch_size=8, epochs=1, verbose=0, callbacks=callbacks).history
    assert history["examples_per_second"] == [8.0]
    assert "eta_seconds" not in history


def test_a_batch_of_nan_counts_as_any_other(set_clock):
    x, y = batch(40)
    x[8:16] = np.nan
    model = tiny_net()
    set_clock(Clock(), ThroughputLogger)
    history = model.fit(x, y, batch_size=8, epochs=1, verbose=0, callbacks=[ThroughputLogger()]).history
    assert history["examples_per_second"] == [8.0]


def by_hand(logger, model, batches):
    logger.set_model(model)
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    for batch_number in batches:
        logger.on_train_batch_end(batch_number)
    logs = {}
    logger.on_epoch_end(0, logs)
    logger.on_train_end()
    return logs


def test_a_loop_of_ones_own_that_does_not_number_its_steps(set_clock):
    model = tiny_net()
    fit(ThroughputLogger(), model=model)
    set_clock(Clock(), ThroughputLogger)
    numbered = by_hand(ThroughputLogger(), model, range(5))
    assert numbered["step_time_ms"] == 1000.0
    set_clock(Clock(), ThroughputLogger)
    assert by_hand(ThroughputLogger(), model, [0] * 5)["step_time_ms"] == 1000.0


def test_one_logger_in_a_fit_within_a_fit():
    logger, inner = ThroughputLogger(), tiny_net()

    class Fits(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 0:
                fit(logger, examples=16, model=inner)  # two steps, as many as the outer fit has done after its next

    history = fit(logger, epochs=2, callbacks=[logger, Fits()])
    assert len(history["step_time_ms"]) == 2
