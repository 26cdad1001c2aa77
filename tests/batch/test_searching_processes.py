"""Trials in a process of their own: what is carried there, and what happens if it dies, hangs or differs."""

import os
import signal
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from gone import gone
from models import assert_same_state, batch, small_net, state

from tfopt import fit, memory, processes
from tfopt.batch import copying, find, process
from tfopt.batch.examples import Examples
from tfopt.batch.limits import Limits
from tfopt.batch.process import Trials
from tfopt.batch.trials import Result

pytestmark = pytest.mark.no_gpu  # where another process gets only what this one leaves of the GPU

LAYER = """
import os, signal, time
import keras

@keras.saving.register_keras_serializable("a_test")
class Deadly(keras.layers.Layer):
    '''Ends or stops a process that is not the one it was written by, from a batch size on.'''

    def __init__(self, size, end, **options):
        super().__init__(**options)
        self.size, self.end = size, end

    def call(self, inputs):
        if (inputs.shape[0] or 0) >= self.size and os.getpid() != {pid}:
            if self.end == "sleep":
                time.sleep(3600)
            os.kill(os.getpid(), int(self.end))
        return inputs

    def get_config(self):
        return super().get_config() | {{"size": self.size, "end": self.end}}
"""


@pytest.fixture
def deadly(monkeypatch, tmp_path):
    """A layer of a module that can be imported in another process, too."""
    name = f"deadly_{os.getpid()}_{time.monotonic_ns()}"
    (tmp_path / f"{name}.py").write_text(LAYER.format(pid=os.getpid()), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__(name).Deadly
    del sys.modules[name], keras.saving.get_custom_objects()["a_test>Deadly"]


def net(*layers, **options):
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers, keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": "adam", "loss": loss} | options)
    model.fit(*batch(4), verbose=0)
    return model


@pytest.fixture
def started(monkeypatch):
    """Numbers of the processes started."""
    numbers = []
    popen = processes.subprocess.Popen

    def start(*arguments, **options):
        found = popen(*arguments, **options)
        numbers.append(found.pid)
        return found

    monkeypatch.setattr(processes.subprocess, "Popen", start)
    yield numbers
    assert all(map(gone, numbers))


@pytest.mark.slow
def test_trials_run_in_one_process_that_is_gone_afterwards(started):
    model = net()
    before = state(model)
    found = find(model, batch(16), largest=16)
    assert found.largest == 16
    medians = {trial.batch_size: np.median(trial.times.samples_ms) for trial in found.trials}
    best = max(size / ms for size, ms in medians.items())
    assert found.recommended == min(size for size, ms in medians.items() if size / ms >= 0.97 * best)
    assert all(trial.fits and trial.own_process for trial in found.trials)
    assert found.in_this_process == ""
    assert len(started) == 1
    assert_same_state(before, state(model))


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGABRT])
def test_a_process_that_is_killed_is_a_row_and_the_search_goes_on(deadly, started, unestimated, end):
    model = net(deadly(size=24, end=int(end)))
    before = state(model)
    found = find(model, batch(16), largest=40)
    assert found.largest == 16
    outcomes = {trial.batch_size: trial.outcome for trial in found.trials}
    assert {size: outcome for size, outcome in outcomes.items() if outcome != "fits"} == {24: "killed", 32: "killed"}
    said = next(trial.reason for trial in found.trials if trial.batch_size == 32)
    assert f"was ended by signal {int(end)}" in said
    assert ("when its memory runs out" in said) == (end == signal.SIGKILL)
    assert all(trial.own_process for trial in found.trials)
    assert len(started) in (2, 3)  # a third, if a size below 24 is of interest after that
    assert_same_state(before, state(model))


@pytest.mark.slow
def test_a_process_that_hangs_is_ended(deadly, started, unestimated, monkeypatch):
    monkeypatch.setattr(process, "_SECONDS", 25.0)
    model = net(deadly(size=32, end="sleep"))
    before = state(model)
    found = find(model, batch(16), largest=100)
    assert (found.largest, [trial.outcome for trial in found.trials if not trial.fits]) == (16, ["hung"])
    assert "did not answer within 25 s" in str(found)
    assert_same_state(before, state(model))


@pytest.mark.slow
def test_an_interruption_ends_the_process_too(started, unestimated, monkeypatch):
    def interrupt(self):
        answer = receive(self)
        if answer is None:  # the copy trains
            return answer
        raise KeyboardInterrupt

    receive = process.Connection.recv
    monkeypatch.setattr(process.Connection, "recv", interrupt)
    model = net()
    before = state(model)
    with pytest.raises(KeyboardInterrupt):
        find(model, batch(16), largest=16)
    assert len(started) == 1
    assert_same_state(before, state(model))


class Unregistered(keras.layers.Layer):
    def call(self, inputs):
        return inputs


def own_loss(targets, outputs):
    return keras.ops.mean(outputs**2, axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: net(Unregistered()), "Could not locate class 'Unregistered'"),
        (lambda: net(loss=own_loss), "Could not locate function 'own_loss'"),
        (lambda: net(optimizer=type("Mine", (keras.optimizers.SGD,), {})()), "Could not locate class 'Mine'"),
    ],
)
def test_a_model_that_cannot_be_copied_is_tried_here(make, reason, started, few_steps):
    model = make()
    before = state(model)
    found = find(model, batch(16), largest=16)
    assert found.largest == 16
    assert not any(trial.own_process for trial in found.trials)
    assert reason in found.in_this_process
    assert f"Trials ran in this process: {found.in_this_process}" in " ".join(str(found).split())
    assert_same_state(before, state(model))


def calls_another(model):
    model.layers[0].call = lambda inputs: keras.ops.reshape(inputs, (-1, 64))


def steps_otherwise(model):
    object.__setattr__(model, "train_step", lambda data: keras.Model.train_step(model, data))


def applies_otherwise(model):
    model.optimizer.__dict__["apply"] = lambda *given: type(model.optimizer).apply(model.optimizer, *given)


REPLACED = [
    (calls_another, "'call' of 'flatten"),
    (steps_otherwise, "'train_step' of 'sequential"),
    (applies_otherwise, "'apply' of 'adam"),
    (memory.recompute, "'_run_through_graph' of 'functional"),
    (lambda model: memory.recompute(model, [model.layers[1].name]), "' of 'dense"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), REPLACED)
def test_a_model_with_a_method_replaced_on_one_object_is_not_copied(change, said):
    model = net(*(keras.layers.Dense(64, activation="relu") for _ in range(8)))
    change(model)
    with pytest.raises(copying.UnsupportedError, match=said):
        copying.to_copy(model)


def test_a_model_that_is_overlapped_is_copied():
    assert copying.to_copy(fit.overlap(net())).traits["layers"]


def test_a_model_whose_errors_are_explained_is_copied():
    with memory.explained_errors(model := net()):
        assert copying.to_copy(model).traits["layers"]


def test_what_cannot_be_located_is_to_be_registered(monkeypatch):
    monkeypatch.setattr(copying, "_apply", lambda settings: None)
    carried = copying.to_copy(net(Unregistered()))
    with pytest.raises(copying.UnsupportedError) as raised:
        copying.copied_here(carried, batch(4))
    assert str(raised.value) == (
        "Could not locate class 'Unregistered'; register it with keras.saving.register_keras_serializable in a module "
        "that can be imported"
    )


@pytest.mark.slow
def test_a_copy_that_differs_is_refused(monkeypatch):
    monkeypatch.setattr(copying, "_apply", lambda settings: None)  # they are this process's own
    model = net(keras.layers.Dense(4))
    carried = copying.to_copy(model)
    assert copying.copied_here(carried, batch(4)).count_params() == model.count_params()
    for name, other in (("layers", []), ("weights", []), ("optimizer", ()), ("metrics", [])):
        with pytest.raises(copying.UnsupportedError, match=f"its copy has other {name}; its get_config"):
            copying.copied_here(carried._replace(traits=carried.traits | {name: other}), batch(4))


CASES = {
    "mixed": lambda: (keras.config.set_dtype_policy("mixed_float16"), small_net("mixed_float16"))[1],
    "xla": lambda: net(jit_compile=True),
    "eager": lambda: net(run_eagerly=True),
    "schedule": lambda: net(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10), 0.9)),
    "frozen": lambda: frozen(),
}


def frozen():
    model = small_net(compiled=False)
    model.layers[0].trainable = False
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_models_are_carried_with_their_settings(case, started):
    model = CASES[case]()
    found = find(model, batch(16), largest=8)
    assert found.in_this_process == ""
    assert [trial.own_process for trial in found.trials if trial.fits] == [True] * len(found.trials)


@pytest.mark.slow
def test_batches_of_several_inputs_arrive_as_they_are(started):
    left, right = keras.Input((4,), name="left"), keras.Input((3,), name="right")
    model = keras.Model(
        {"left": left, "right": right},
        {"a": keras.layers.Dense(1, name="a")(keras.layers.Concatenate()([left, right]))},
    )
    model.compile("adam", {"a": "mse"})
    x = {"left": np.ones((4, 4), "float32"), "right": np.ones((4, 3), "float32")}
    data = tf.data.Dataset.from_tensors((x, {"a": np.ones((4, 1), "float32")}, np.ones(4, "float32")))
    found = find(model, data, largest=16)
    assert (found.largest, found.in_this_process) == (16, "")


def test_a_process_that_cannot_start_again_gives_way_to_this_one(monkeypatch, few_steps):
    class Dies:
        def __init__(self, model, given):
            self.asked = 0

        def __call__(self, given):
            self.asked += 1
            if self.asked > 1:
                raise process.UnsupportedError("the trial's process ended with code 1")
            return Result("killed", "signal 9")

        def close(self):
            pass

    monkeypatch.setattr(process, "TrialProcess", Dies)
    model, limits = net(), Limits(None, "", {})
    with Trials(model, Examples(model, batch(8))) as trials:
        first, second = (trials(8, limits) for _ in range(2))
    assert (first.outcome, first.own_process) == ("killed", True)
    assert (second.outcome, second.own_process) == ("fits", False)
    assert trials.here_because == "the trial's process ended with code 1"


@pytest.mark.slow
@pytest.mark.parametrize(("room", "own"), [(0.0, []), (100.0, [True, False]), (1000.0, [True, True])])
def test_on_a_gpu_the_other_process_gets_what_fits_there(monkeypatch, few_steps, room, own):
    class Fits:
        def __init__(self, model, given):
            pass

        def __call__(self, given):
            return Result("killed", "signal 9")

        def close(self):
            pass

    monkeypatch.setattr(process, "TrialProcess", Fits)
    monkeypatch.setattr(process, "room_outside_mib", lambda: room)
    model, limits = net(), Limits(None, "", {0: 10.0, 8: 90.0})
    with Trials(model, Examples(model, batch(8))) as trials:
        found = [trials(size, limits).own_process for size in (8, 16)]
    assert found == (own or [False, False])
    assert ("holds the GPU's memory" in trials.here_because) == (not all(found))
