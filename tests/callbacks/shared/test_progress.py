"""What a training that stands still is doing, in fits that are held up at a known place."""

import gc
import os
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from clock import Clock
from quick import first_quick
from watched_fit import fit, shared_net

from tfopt.callbacks.shared.progress import Progress, thread_frames
from tfopt.fit import overlap, undo

BATCH = (np.ones((4, 3), "float32"), np.ones((4, 2), "float32"))
SPEC = tuple(tf.TensorSpec(part.shape) for part in BATCH)


class Held:
    """Something that one call out of many waits in, until a thread has looked at what the training does then."""

    def __init__(self, hooks, at):
        self.hooks, self.at, self.calls = hooks, at, 0
        self.reached, self.released = threading.Event(), threading.Event()
        self.found = None
        self.looking = threading.Thread(target=self.look)
        self.looking.start()

    def __call__(self, *_):
        self.calls += self.hooks.progress is not None  # Keras takes a batch before, to build the model
        if self.calls == self.at + 1 and not self.reached.is_set():
            self.reached.set()
            self.released.wait(10)

    def look(self):
        self.reached.wait(10)
        time.sleep(0.3)  # the steps before have ended
        self.found = self.hooks.progress.standstill()
        self.released.set()


class Hooks(keras.callbacks.Callback):
    """Tells a Progress what UtilizationAlert does."""

    progress = None

    def on_train_begin(self, logs=None):
        self.progress = Progress()

    def on_epoch_begin(self, epoch, logs=None):
        self.progress.begin_epoch((self.params["steps"] or 0) - 1)

    def on_train_batch_end(self, batch, logs=None):
        self.progress.end_step(batch)

    def on_test_begin(self, logs=None):
        self.progress.phase = "validation"

    def on_epoch_end(self, epoch, logs=None):
        self.progress.phase = "between epochs"


def generated(held, batches=8):
    def batches_of():
        for _ in range(batches):
            held()
            yield BATCH

    data = tf.data.Dataset.from_generator(batches_of, output_signature=SPEC)
    return data.apply(tf.data.experimental.assert_cardinality(batches))


def stepping(held):
    """A model of which one step waits."""

    class Waits(keras.layers.Layer):
        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda value: (held(), value)[1], [x], tf.float32), x.shape)

    model = keras.Sequential([keras.Input((3,)), Waits(), keras.layers.Dense(2)])
    model.compile("sgd", "mse", jit_compile=False)
    return model


def stands(at, run):
    hooks = Hooks()
    held = Held(hooks, at)
    run(held, hooks)
    held.looking.join()
    assert held.found is not None, "it was never held"
    return held.found


def fits(data, callbacks, model=None, **options):
    (model or shared_net()).fit(data, verbose=0, shuffle=False, callbacks=callbacks, **options)


@pytest.mark.parametrize("at", first_quick([3, 0]))
def test_a_batch_that_does_not_come(at):
    assert stands(at, lambda held, hooks: fits(generated(held), [hooks])) == ("input", None)


def test_a_batch_that_does_not_come_after_more_than_tf_data_remembers():
    assert stands(150, lambda held, hooks: fits(generated(held, 160), [hooks])) == ("input", None)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"epochs": 3}, {"epochs": 8, "steps_per_epoch": 20}])
def test_in_a_later_epoch_with_an_iterator_of_its_own_and_with_one_for_all(options):
    assert stands(
        150, lambda held, hooks: fits(generated(held, 60 if options["epochs"] == 3 else 160), [hooks], **options)
    ) == ("input", None)


@pytest.mark.parametrize(("at", "named"), first_quick([(3, "step"), (0, "first step"), (150, "step")]))
def test_a_step_that_does_not_end(at, named):
    data = tf.data.Dataset.from_tensors(BATCH).repeat(160)
    assert stands(at, lambda held, hooks: fits(data, [hooks], stepping(held))) == (named, None)


@pytest.mark.slow
def test_several_steps_an_execution():
    def run(held, hooks):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse", jit_compile=False, steps_per_execution=4)
        fits(generated(held), [hooks], model)

    assert stands(6, run) == ("input", None)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["input", "step"])
def test_overlapped(where):
    def run(held, hooks):
        model = stepping(held if where == "step" else lambda: None)
        overlap(model, log_every=2, steps_in_flight=2)
        fits(generated(held if where == "input" else lambda: None), [hooks], model)
        undo(model)

    assert stands(3, run) == (where, None)


def test_a_loop_of_ones_own():
    def run(held, hooks):
        hooks.on_train_begin()
        for batch, data in enumerate(generated(held)):
            shared_net().train_on_batch(*data)
            hooks.on_train_batch_end(batch)

    assert stands(3, run) == ("input", None)


class Saves(keras.callbacks.Callback):
    def __init__(self, held, hook):
        super().__init__()
        self.held, self.hook = held, hook

    def on_epoch_end(self, epoch, logs=None):
        if self.hook == "on_epoch_end":
            self.held()

    def on_train_batch_end(self, batch, logs=None):
        if self.hook == "on_train_batch_end":
            self.held()


@pytest.mark.parametrize(
    ("first", "hook"),
    first_quick([(True, "on_epoch_end"), (False, "on_epoch_end"), (False, "on_train_batch_end")]),
)
def test_a_callback(first, hook):
    def run(held, hooks):
        fit(*([Saves(held, hook), hooks] if first else [hooks, Saves(held, hook)]), epochs=2)

    assert stands(1, run) == ("callback", f"Saves.{hook}")


@pytest.mark.slow
@pytest.mark.parametrize("where", ["input", "validation"])
def test_validation(where):
    def run(held, hooks):
        once = tf.data.Dataset.from_tensors(BATCH)
        if where == "input":
            fits(once, [hooks], validation_data=generated(held))
        else:
            fits(once, [hooks], stepping(held), validation_data=once)

    assert stands(1, run) == (where, None)


@pytest.mark.slow
def test_under_a_strategy_it_cannot_be_told():
    def run(held, hooks):
        with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
            model.compile("sgd", "mse", jit_compile=False)
        fits(generated(held, 16), [hooks], model)

    assert stands(10, run) == ("training", None)


@pytest.mark.slow
def test_tracing():
    def run(held, hooks):
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", lambda y, p: (held(), keras.ops.mean(p))[1], jit_compile=False)
        fits(tf.data.Dataset.from_tensors(BATCH), [hooks], model)

    assert stands(0, run) == ("tracing", None)


def test_seconds_since_a_step_of_training_or_validation(set_clock):
    clock = Clock()
    set_clock(clock, Progress)
    progress = Progress()
    told = []
    for act in (
        lambda: None,
        lambda: progress.end_step(0),
        lambda: None,
        lambda: progress.begin_validation_step(),
        lambda: None,
    ):
        act()
        told.append(progress.seconds_since_step)
        clock.now += 10
    assert told == [0, 0, 10, 0, 10]
    assert progress.stepped_at == clock.now - 40


def test_after_the_last_step_of_an_epoch_no_step_is_under_way():
    progress = Progress()
    progress.begin_epoch(1)
    phases = []
    for batch in (0, 1):
        progress.end_step(batch)
        phases.append(progress.phase)
    assert phases == ["training", "between epochs"]


def test_the_last_of_an_epochs_executions_may_count_steps_beyond_it():
    progress = Progress()
    progress.begin_epoch(5)
    progress.end_step(3)
    assert progress.phase == "training"
    progress.end_step(7)
    assert progress.phase == "between epochs"
    progress.begin_epoch(-1)  # unknown
    progress.end_step(3)
    assert progress.phase == "training"


FRAMES_AND_GARBAGE = """
import gc, threading
from tfopt.callbacks.shared.progress import thread_frames

class Ring:
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.value = 1

def deep(depth):  # thread_frames makes the frame of each thread's innermost call, and each may set off a collection
    Ring()
    return deep(depth - 1) if depth else thread_frames()

gc.set_threshold(1)
for _ in range(300):
    assert deep(3)[threading.get_ident()]
assert gc.isenabled()
gc.disable()
thread_frames()
assert not gc.isenabled()
"""


def test_garbage_with_thread_locals_does_not_stop_all_threads():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    # In a process of its own, since the test would hold the interpreter's lock for ever.
    subprocess.run([sys.executable, "-c", FRAMES_AND_GARBAGE], env=environment, check=True, timeout=120)


def test_two_threads_that_ask_for_frames_leave_the_garbage_collector_on():
    done = threading.Event()

    def ask():
        while not done.is_set():
            thread_frames()

    others = [threading.Thread(target=ask) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for other in others:
            other.start()
        for _ in range(2000):
            thread_frames()
    finally:
        done.set()
        for other in others:
            other.join()
        sys.setswitchinterval(interval)
    assert gc.isenabled()
