"""Callbacks do what they do under stock `fit`: Keras' own, tfopt's, and anybody's."""

import contextlib
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from fitting import Pair, Trace, X, Y, dataset, dense_net

from tfopt import fit
from tfopt.callbacks import CompilationLogger, ThroughputLogger, UtilizationLogger

VALIDATION = (X[:8], Y[:8])
WITH_NAN = np.where(np.arange(40) == 20, np.nan, 1).astype("float32")


@pytest.fixture(scope="module")
def pair():
    return Pair()


def batches():
    return dataset(batch=8)  # five


class Stop(keras.callbacks.Callback):
    """Stops in the middle of an epoch, in one way or another."""

    def __init__(self, how):
        super().__init__()
        self.how, self.steps = how, 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 7:
            if self.how:
                raise self.how("stopped")
            self.model.stop_training = True


@pytest.mark.slow
def test_by_epoch(pair, tmp_path):
    def train(model):
        log = tmp_path / "log.csv"
        callbacks = [
            keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True, start_from_epoch=1),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * (3 if epoch == 2 else 1)),
            keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=0.05),
            keras.callbacks.CSVLogger(log),
        ]
        fitted = model.fit(
            batches(), epochs=8, validation_data=VALIDATION, verbose=0, shuffle=False, callbacks=callbacks
        )
        model.optimizer.learning_rate = 0.1
        return fitted.history, log.read_text()

    history, log = pair.train(train)
    assert 2 < len(history["loss"]) < 8
    assert len(set(history["learning_rate"])) > 1
    assert log.count("\n") == len(history["loss"]) + 1


@pytest.mark.slow
def test_checkpoints_within_epochs(pair, tmp_path):
    def train(model):
        folder = tmp_path / str(id(model))
        every_two = str(folder / "{epoch}-{batch}-{loss:.9f}.weights.h5")
        best = str(folder / "best-{epoch}-{accuracy:.9f}.weights.h5")
        callbacks = [
            keras.callbacks.ModelCheckpoint(every_two, save_freq=2, save_weights_only=True),
            keras.callbacks.ModelCheckpoint(best, "accuracy", save_freq=3, save_best_only=True, save_weights_only=True),
        ]
        model.fit(batches(), epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
        kept = []
        for path in sorted(folder.iterdir()):
            model.load_weights(path)
            kept.append((path.name, [weight.tobytes() for weight in model.get_weights()]))
        return kept

    assert len(pair.train(train)) > 7


@pytest.mark.slow
def test_a_crash_and_its_backup(tmp_path):
    def train(model):
        backup = [keras.callbacks.BackupAndRestore(tmp_path / str(id(model)), save_freq=3)]
        with pytest.raises(ZeroDivisionError, match="stopped"):
            model.fit(batches(), epochs=3, verbose=0, shuffle=False, callbacks=[*backup, Stop(ZeroDivisionError)])
        trace = Trace()
        history = model.fit(batches(), epochs=3, verbose=0, shuffle=False, callbacks=[*backup, trace])
        return history.history, history.epoch, trace.calls

    _, epochs, _ = Pair().train(train)
    assert epochs == [1, 2]


@pytest.mark.parametrize("how", [None, KeyboardInterrupt, RuntimeError])
def test_a_training_cut_short_and_the_next(pair, how):
    def train(model):
        trace, keyword = Trace(), {"verbose": 0, "shuffle": False}
        with pytest.raises(how, match="stopped") if how else contextlib.nullcontext():
            model.fit(batches(), epochs=3, callbacks=[trace, Stop(how)], **keyword)
        steps = int(model.optimizer.iterations)
        return trace.calls, steps, model.fit(batches(), epochs=2, **keyword).history

    _, steps, _ = pair.train(train)
    assert steps == 7


def test_nan_ends_the_training_at_its_step(pair):
    def train(model):
        stop, trace = keras.callbacks.TerminateOnNaN(), Trace()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            weighted = tf.data.Dataset.from_tensor_slices((X, Y, WITH_NAN)).batch(8)
            model.fit(weighted, epochs=3, verbose=0, shuffle=False, callbacks=[stop, trace])
        # Not those of Keras 3.13 on NumPy.
        named.append([str(warning.message) for warning in found if warning.category is UserWarning])
        return repr(trace.calls), int(model.optimizer.iterations)

    named = []
    _, steps = pair.train(train)
    assert steps == 3
    assert named[0] == []
    assert len(named[1]) == 1
    assert "TerminateOnNaN, so every step waits for the device" in named[1][0]


class Reader(keras.callbacks.Callback):
    """Reads the logs on every so many steps, and may say so."""

    def __init__(self, every=1, says_so=False):
        super().__init__()
        self.every, self.seen = every, []
        if says_so:
            self.needs_every_step = True

    def on_train_batch_end(self, batch, logs=None):
        if batch % self.every == 0:
            self.seen.append((batch, logs["loss"]))

    on_test_batch_end = on_train_batch_end


class Measure(keras.callbacks.Callback):
    """Looks at the model itself."""

    needs_every_step = True

    def __init__(self):
        super().__init__()
        self.read = []

    def on_train_batch_end(self, batch, logs=None):
        self.read.append(getattr(logs, "were_read", True))


def test_one_that_reads_on_every_step_is_right_and_named_once(pair):
    def train(model):
        reader, other = Reader(), Reader(every=4)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            model.fit(batches(), epochs=3, verbose=0, shuffle=False, callbacks=[other, reader])
        named.append([str(warning.message) for warning in found])
        return reader.seen, other.seen

    named = []
    seen, some = pair.train(train)
    assert len(seen) == 15
    assert len(some) == 6
    assert [len(messages) for messages in named] == [0, 1]
    assert "Found Reader, so every step waits" in named[1][0]


def test_one_that_reads_now_and_then_is_not_named(pair):
    def train(model):
        calls = []
        shown = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: calls.append(dict(logs)) if batch % 2 else None,
            on_epoch_end=lambda epoch, logs: calls.append(logs),
        )
        model.fit(batches(), epochs=2, verbose=0, shuffle=False, callbacks=[shown])
        return calls

    assert len(pair.train(train)) == 6


def test_one_that_says_so_is_called_when_the_step_has_ended():
    model, measure = fit.overlap(dense_net()), Measure()
    with pytest.warns(UserWarning, match="Found Measure and Reader, so every step waits for the device"):
        model.fit(batches(), verbose=0, shuffle=False, callbacks=[measure, Reader(every=9, says_so=True)])
    assert measure.read == [True] * 5


def test_logs_are_shared_by_those_in_the_list(pair):
    class Adds(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            logs["added"] = batch
            logs["loss"] = -1.0

    def train(model):
        trace = Trace()
        history = model.fit(batches(), verbose=0, shuffle=False, callbacks=[Adds(), trace])
        return history.history, trace.calls

    history, calls = pair.train(train)
    assert [logs["added"] for call, _, logs in calls[:-2] if call == "end"] == [0, 1, 2, 3, 4]
    assert history["loss"][0] > 0


def test_evaluation_hands_them_out_as_well(pair):
    def train(model):
        reader, trace, calls = Reader(every=2), Trace(), []
        model.evaluate(batches(), verbose=0, callbacks=[reader, trace, keras.callbacks.TerminateOnNaN()])
        shape = keras.callbacks.LambdaCallback(
            on_predict_batch_end=lambda batch, logs: calls.append((batch, logs["outputs"].shape))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.predict(batches(), verbose=0, callbacks=[shape])
        return reader.seen, trace.calls, calls

    _, _, calls = pair.train(train)
    assert calls == [(batch, (8, 4)) for batch in range(5)]


@pytest.mark.slow
def test_tensorboard(pair, tmp_path):
    pytest.importorskip("tensorboard")

    def train(model):
        written = []
        for frequency in ("epoch", 2, "batch"):
            folder = tmp_path / f"{id(model)}-{frequency}"
            callback = keras.callbacks.TensorBoard(folder, update_freq=frequency, write_graph=False)
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                model.fit(
                    batches(), epochs=2, validation_data=VALIDATION, verbose=0, shuffle=False, callbacks=[callback]
                )
            # TensorBoard itself warns too.
            named.append([str(warning.message) for warning in found if "waits for the device" in str(warning.message)])
            written.append(summaries(folder))
        return written

    named = []
    epoch, _, batch = pair.train(train)
    assert not any("batch_" in tag for tag, *_ in epoch)
    assert sum(tag == "batch_loss" for tag, *_ in batch) == 10
    assert [len(messages) for messages in named] == [0, 0, 0, 0, 0, 1]
    assert "TensorBoard" in named[-1][0]


def summaries(folder):
    """What was written, but for the time it took."""
    found = []
    for path in sorted(folder.rglob("events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [(value.tag, event.step, value.tensor.tensor_content) for value in event.summary.value]
    return sorted(found)


@pytest.mark.slow
def test_tfopts_own_read_nothing(conversions):
    loggers = [CompilationLogger(), ThroughputLogger(), UtilizationLogger()]
    model = fit.overlap(dense_net())
    history = model.fit(dataset(batch=2), epochs=2, verbose=0, shuffle=False, callbacks=loggers).history
    assert conversions() == 3  # one for each epoch's end, and one for the training's
    assert history["step_time_ms"][1] > 0
    assert history["examples_per_second"][1] > 0
