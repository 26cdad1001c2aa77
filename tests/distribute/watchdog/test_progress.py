"""What counts as progress of a training, and when a thread has made none for too long, at exact times."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from quick import first_quick

from tfopt.distribute.watchdog import progress as progress_module
from tfopt.distribute.watchdog.progress import Deadline, Progress, count_progress
from tfopt.distribute.watchdog.training_process import Intervals
from tfopt.internals.patches import present, undo

INTERVALS = Intervals(progress_seconds=100, beat_seconds=2, silent_seconds=20)


@pytest.fixture
def progress(monkeypatch):
    """A fresh count; what hooks replace is restored."""
    fresh = Progress()
    monkeypatch.setattr(progress_module, "progress", fresh)
    yield fresh
    undo(patch for patch in present() if patch.by == progress_module.BY)


class Clock:
    """Time that passes in heartbeats."""

    def __init__(self, progress, thread=None, intervals=INTERVALS):
        self.now = 0.0
        progress.counted = True
        self.deadline = Deadline(intervals, thread or threading.get_ident(), clock=lambda: self.now)

    def after(self, seconds):
        """What the deadline says at the first heartbeat at which it says something, or the last."""
        for _ in range(int(seconds / 2)):
            self.now += 2
            if said := self.deadline.missed():
                return said
        return ""


def make_model(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse", **options)
    return model


X, Y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")


class TestTheDeadline:
    def test_is_missed_after_so_many_seconds_without_progress(self, progress):
        clock = Clock(progress)
        assert clock.after(100) == ""
        progress.moves += 1
        assert clock.after(100) == ""
        assert "no progress for 100 s, and waits in " in clock.after(2)
        assert clock.now == 202

    def test_is_off_by_default_and_where_nothing_is_counted(self, progress):
        assert Clock(progress, intervals=Intervals(beat_seconds=2)).after(10_000) == ""
        clock = Clock(progress)
        progress.counted = False
        assert clock.after(10_000) == ""

    def test_leaves_out_the_time_a_process_was_stopped(self, progress):
        clock = Clock(progress)
        assert clock.after(50) == ""
        clock.now += 10_000
        assert clock.after(48) == ""
        assert "no progress for 10" in clock.after(4)

    def test_names_the_line_at_which_a_thread_waits(self, progress):
        thread = threading.Thread(target=(done := threading.Event()).wait, daemon=True)
        own = threading.Thread(target=lambda: done.wait(), daemon=True)
        for each in (thread, own):
            each.start()
        progress.at, progress.loop, progress.epoch, progress.step = "step", "epoch", 2, 5
        try:
            said = Clock(progress, own.ident).after(200)
            assert said.startswith("it has made no progress for 100 s, since epoch 2, step 5, and waits in <lambda> (")
            assert f"({__file__}:" in said
            assert ", in wait (" in said
            assert ", in wait (" in Clock(progress, thread.ident).after(200)  # no line of the user's
        finally:
            done.set()
        own.join()
        assert "a thread that has ended" in Clock(progress, own.ident).after(200)

    def test_a_wait_in_tensorflow_is_reported_later(self, progress):
        namespace, done = {"__name__": "tensorflow.python.distribute.cross_device_ops"}, threading.Event()
        exec("def reduce(event): event.wait()", namespace)  # its threads wait in Python's own modules
        thread = threading.Thread(target=namespace["reduce"], args=(done,), daemon=True)
        thread.start()
        try:
            clock = Clock(progress, thread.ident)
            assert clock.after(118) == ""
            assert "no progress for 120 s" in clock.after(10)
        finally:
            done.set()
        thread.join()


class TestWhatCounts:
    @pytest.mark.parametrize("eagerly", first_quick([False, True]))
    @pytest.mark.parametrize("loop", ["fit", "validation", "evaluate", "predict"])
    def test_every_batch_of_keras_loops(self, progress, loop, eagerly):
        model, said = make_model(run_eagerly=eagerly), []
        count_progress()
        clock = Clock(progress)
        hooks = {"fit": "on_train_batch_end", "predict": "on_predict_batch_end"}
        callback = keras.callbacks.LambdaCallback()
        setattr(callback, hooks.get(loop, "on_test_batch_end"), lambda *_, **__: said.append(clock.after(90)))
        options = {"batch_size": 1, "callbacks": [callback], "verbose": 0}
        if loop in ("fit", "validation"):
            model.fit(X, Y, validation_data=(X, Y), validation_batch_size=1, **options)
        elif loop == "evaluate":
            model.evaluate(X, Y, **options)
        else:
            model.predict(X, **options)
        assert said == [""] * 8

    def test_the_place(self, progress):
        count_progress(deadline=False)
        places = [progress.place]
        note = keras.callbacks.LambdaCallback()
        for hook in progress_module._PLACES:
            setattr(note, hook, lambda *_, **__: places.append(progress.place))
        make_model().fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), callbacks=[note], verbose=0)
        evaluate = ["the start of evaluate", "evaluate, step 1", "the end of evaluate"]
        epoch_1 = ["the start of epoch 1", "epoch 1, step 1", *evaluate, "the end of epoch 1"]
        epoch_2 = [place.replace("epoch 1", "epoch 2") for place in epoch_1]
        assert places == ["", *epoch_1, *epoch_2, "the end of fit"]
        assert not progress.counted

    def test_a_training_loop_of_ones_own(self, progress):
        model = make_model()
        model.optimizer.build(model.weights)
        step = tf.function(lambda: model.optimizer.apply([tf.ones_like(weight) for weight in model.weights]))
        strategy = tf.distribute.get_strategy()
        count_progress()
        for call in (
            step,
            lambda: strategy.run(model.optimizer.apply, ([tf.ones_like(each) for each in model.weights],)),
        ):
            before = progress.moves
            call()
            assert progress.moves > before

    def test_saving(self, progress, tmp_path):
        model = make_model()
        count_progress()
        checkpoint = tf.train.Checkpoint(model=model)
        saves = [
            lambda: model.save(tmp_path / "a.keras"),
            lambda: model.save_weights(tmp_path / "a.weights.h5"),
            lambda: model.load_weights(tmp_path / "a.weights.h5"),
            lambda: checkpoint.write(str(tmp_path / "a")),
            lambda: checkpoint.read(str(tmp_path / "a")),
            tf.train.CheckpointManager(checkpoint, str(tmp_path), 1).save,
        ]
        for save in saves:
            before = progress.moves
            save()
            assert progress.moves >= before + 2

    def test_twice_is_as_once(self, progress):
        for deadline in (False, True, True, False):
            count_progress(deadline=deadline)
        function = tf.function(lambda: 1)
        function()
        assert progress.moves == 2

    def test_training_computes_the_same(self, progress):
        def trained():
            model = make_model(metrics=["mae"])
            history = model.fit(X, Y, batch_size=2, epochs=2, validation_data=(X, Y), verbose=0).history
            return history, [weight.numpy().tolist() for weight in model.weights]

        stock = trained()
        count_progress()
        assert trained() == stock
        assert progress.moves > 0

    def test_functions_in_functions(self, progress):
        count_progress()
        inner = tf.function(lambda x: x + 1)
        strategy = tf.distribute.get_strategy()

        @tf.function
        def outer(x):
            for _ in tf.range(3):
                x = strategy.run(inner, (x,))
            return x

        assert outer(tf.constant(0)).numpy() == 3
