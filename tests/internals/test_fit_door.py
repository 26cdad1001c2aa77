import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
from watched_fit import fit, net

from tfopt.callbacks.shared import running_fit as running_fit_module
from tfopt.callbacks.shared.running_fit import Callback, running_iterator, running_list
from tfopt.internals.fit_door import current_iterator, list_of, running_fit
from tfopt.internals.patches import present
from tfopt.internals.training import TensorFlowTrainer


class Looks(Callback):
    """Keeps what it finds at each step."""

    def __init__(self):
        super().__init__()
        self.lists, self.fits, self.iterators = [], [], []

    def set_model(self, model):
        super().set_model(model)
        self.lists.append(running_list(self))

    def on_train_batch_end(self, step, logs=None):
        running = running_fit()
        self.lists.append(running_list(self))
        self.fits.append((running, running and running.epochs))
        self.iterators.append(running_iterator())


def of(list_):
    return [type(each).__name__ for each in list_.callbacks]


def test_fits_own_list_is_known_from_the_first_hook():
    looks, other = Looks(), keras.callbacks.LambdaCallback()
    fit(other, looks)
    assert len({id(found) for found in looks.lists}) == 1
    assert of(looks.lists[0])[:2] == ["LambdaCallback", "Looks"]
    assert running_fit() is None
    assert running_list(Looks()) is None


def test_a_list_that_fit_is_given_is_known():
    looks, model = Looks(), net()
    given = keras.callbacks.CallbackList([looks], model=model, add_history=True, epochs=1, steps=4)
    x = np.ones((16, 3), "float32")
    model.fit(x, x[:, :2], batch_size=4, verbose=0, callbacks=given)
    assert all(found is given for found in looks.lists)


def test_a_loop_of_ones_own_is_known_by_its_list_alone():
    looks = Looks()
    given = keras.callbacks.CallbackList([looks])
    given.on_train_batch_end(0)
    assert (looks.lists, looks.fits, looks.iterators) == ([given], [(None, None)], [None])
    del given
    looks.lists.clear()
    gc.collect()
    assert list_of(looks) is None


@pytest.mark.parametrize(
    ("options", "steps"), [({}, 4), ({"steps_per_epoch": 2}, 2), ({"validation_split": 0.25}, 3), ({"epochs": 2}, 8)]
)
def test_the_iterator_of_the_running_batches(options, steps):
    looks = Looks()
    fit(looks, **options)
    assert all(isinstance(one, tf.data.Iterator) for one in looks.iterators)
    assert len(looks.iterators) == steps


def test_the_iterator_of_data_of_unknown_length():
    looks, model = Looks(), net()
    x = np.ones((16, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(4).filter(lambda *_: True)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[looks])
    assert len(looks.iterators) == 8
    assert len({id(one) for one in looks.iterators}) == 2


def test_an_iterator_goes_with_its_epoch():
    """One that waited for the garbage collection would hold up the step in which that comes."""
    looks = Looks()
    fit(looks, epochs=2)
    epochs = looks.fits[0][1]
    looks.iterators.clear()
    epochs._current_iterator = None
    gc.disable()
    try:
        assert current_iterator(epochs) is None
    finally:
        gc.enable()


def test_a_fit_within_a_fit_and_one_in_another_thread_have_their_own():
    inner, beside, outer = Looks(), Looks(), Looks()

    class Fits(keras.callbacks.Callback):
        def on_train_batch_end(self, step, logs=None):
            if step == 1:
                fit(inner, model=net())
                thread = threading.Thread(target=fit, args=(beside,), kwargs={"model": net()})
                thread.start()
                thread.join()

    fit(outer, Fits())
    fits = [{id(running) for running, _ in looks.fits} for looks in (inner, beside, outer)]
    assert [len(found) for found in fits] == [1, 1, 1]
    assert len(set.union(*fits)) == 3
    assert running_fit() is None


def test_ends_are_called_last_first_and_once_whatever_ends_the_fit():
    for error in (None, RuntimeError, KeyboardInterrupt, SystemExit):
        ended = []

        class Opens(Callback):
            def on_train_begin(self, logs=None, ended=ended):
                for number in range(2):
                    running_fit().ends.callback(ended.append, number)

            def on_train_batch_end(self, step, logs=None, error=error, ended=ended):
                assert not ended
                if error:
                    raise error

        if error is None:
            fit(Opens())
        else:
            with pytest.raises(error):
                fit(Opens())
        assert ended == [1, 0]


FIRST = """
import sys
import keras, numpy as np
from watched_fit import Interrupts
from tfopt.callbacks import TrainingCheckpoint
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse", jit_compile=False)
for _ in range(2):  # the folder is free again, though the exception is kept
    try:
        model.fit(np.ones((4, 2)), np.ones(4), verbose=0, callbacks=[TrainingCheckpoint(sys.argv[1]), Interrupts()])
    except KeyboardInterrupt as error:
        kept = error
print(type(kept).__name__)
"""


def test_the_first_callback_of_a_process_may_be_made_in_the_call_of_fit(tmp_path):
    """Python looks `fit` up before it makes the callback that opens the door."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", FIRST, str(tmp_path)]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "KeyboardInterrupt", ran.stderr[-2000:]


def test_a_patch_of_fit_for_a_while_leaves_the_door_open(monkeypatch):
    stock = TensorFlowTrainer.fit
    with monkeypatch.context() as patched:
        patched.setattr(TensorFlowTrainer, "fit", lambda *args, **options: stock(*args, **options))
        fit(Looks())
    looks = Looks()
    fit(looks)
    assert looks.fits[0][0] is not None
    doors = [patch for patch in present() if patch.by == "callbacks"]
    Looks()
    assert [patch for patch in present() if patch.by == "callbacks"] == doors


def test_wrong_arguments_fail_as_in_keras():
    with pytest.raises(TypeError, match="nonsense"):
        net().fit(np.ones((4, 3)), nonsense=1)


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_are_followed(made, monkeypatch):
    opened, looks = [], Looks()
    monkeypatch.setattr(running_fit_module, "open_door", lambda: opened.append(1))
    made(looks)
    assert opened == [1]


@dataclass
class Equal(keras.callbacks.Callback):
    """Without a hash, and equal to any other of its number."""

    number: int = 0

    def __post_init__(self):
        super().__init__()
        self.steps = 0

    def on_train_batch_end(self, step, logs=None):
        self.steps += 1


def test_callbacks_without_a_hash_are_callbacks_all_the_same():
    looks, equal = Looks(), [Equal(), Equal()]
    fit(equal[0], looks, equal[1])
    assert [each.steps for each in equal] == [4, 4]
    one, other = (keras.callbacks.CallbackList([each]) for each in equal)
    assert (list_of(equal[0]), list_of(equal[1])) == (one, other)
