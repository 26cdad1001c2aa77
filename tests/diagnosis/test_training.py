"""What `fit` is given, and that it comes back as it was."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.callbacks import TrainingCheckpoint
from tfopt.causes.catalogue import INPUT, NO_PREFETCH
from tfopt.diagnosis.arms import FitArm
from tfopt.diagnosis.candidates import callback_names, candidates
from tfopt.diagnosis.pauses import epoch_ends
from tfopt.diagnosis.training import Training
from tfopt.internals.sources import find
from tfopt.pipelines import plan_pipeline

X, Y = np.zeros((40, 2), "float32"), np.zeros((40, 1), "float32")


def made():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_script_need_not_set_a_seed(monkeypatch):
    context = getattr(*find("tensorflow.python.eager.context:context"))()
    monkeypatch.delattr(context, "_rng", raising=False)
    monkeypatch.setattr(context, "_seed", None)
    model = made()
    training = Training.of(model, {"x": X, "y": Y})
    before = model.get_weights()
    with training.untouched():
        model.fit(training.resident.map(lambda x, y: (x + 1, y + 1)), steps_per_epoch=1, verbose=0, shuffle=False)
        assert not all(map(np.array_equal, model.get_weights(), before))
    assert all(map(np.array_equal, model.get_weights(), before))


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"x": X}, ValueError, r"Expected inputs and targets\. Found inputs alone\. Pass arrays as one .*\(x, y\)"),
        (
            {"x": tf.data.Dataset.from_tensor_slices((X, Y))},
            ValueError,
            r"Expected batches of the shape \(None, 2\)\. Found \(2,\), an example alone\. Call dataset\.batch\(32\)",
        ),
        ({"x": X, "callbacks": Y}, TypeError, r"Received: ndarray\. Arrays are one argument: \(x, y\)\."),
        (
            {"x": X, "y": Y, "callbacks": [keras.callbacks.EarlyStopping]},
            TypeError,
            r"Received: the class EarlyStopping\. Create one: EarlyStopping\(\.\.\.\)\.",
        ),
        ({"x": X, "y": Y, "callbacks": ["log"]}, TypeError, r"Received: str\."),
    ],
)
def test_mistakes_are_named(arguments, error, said):
    with pytest.raises(error, match=said):
        Training.of(made(), arguments)


def test_one_callback_need_not_be_in_a_list():
    stop = keras.callbacks.EarlyStopping()
    assert Training.of(made(), {"x": X, "y": Y, "callbacks": stop}).callbacks[0] is stop


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 5

    def __getitem__(self, number):
        return X[:8], Y[:8]


def endless():
    while True:
        yield X[:8], Y[:8]


SLICES = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)


@pytest.mark.parametrize(
    ("arguments", "remedy"),
    [
        ({"x": X, "y": Y, "batch_size": 8}, "dataset = build_pipeline((x, y), batch_size=8)\nmodel.fit(dataset, ...)"),
        ({"x": X, "y": Y, "validation_split": 0.2}, "validation_data=(x[cut:], y[cut:])"),
        ({"x": SLICES}, "# No line to paste: nothing is computed in it that a cache could keep."),
        ({"x": plan_pipeline((X, Y), batch_size=8)}, "# No line to paste: its cache: it would save nothing"),
        ({"x": Batches()}, "dataset.workers, dataset.max_queue_size = 4, 16"),
        (
            {"x": endless()},
            "# No line to paste: a generator yields one batch after the other; a\n# keras.utils.PyDataset can",
        ),
    ],
)
def test_the_remedy_of_slow_input_suits_the_data(arguments, remedy):
    found = {one.name: one for one in candidates(Training.of(made(), arguments))}
    assert remedy in found[INPUT.name].remedy
    lines = found[INPUT.name].remedy.splitlines()
    assert max(len(line) for line in lines if not line.startswith("model.fit(")) <= 90
    assert found[INPUT.name].at_most
    assert NO_PREFETCH.name not in found


@pytest.mark.slow
@pytest.mark.parametrize("switched_off", ["autotune", "injection", "optimizations"])
def test_a_prefetch_is_tried_where_tensorflow_adds_none(switched_off):
    options = tf.data.Options()
    if switched_off == "autotune":
        options.autotune.enabled = False
    elif switched_off == "injection":
        options.experimental_optimization.inject_prefetch = False
    else:
        options.experimental_optimization.apply_default_optimizations = False
    data = SLICES.with_options(options)
    found = {one.name: one for one in candidates(Training.of(made(), {"x": data}))}
    assert found[NO_PREFETCH.name].against == "now"
    assert found[INPUT.name].against == NO_PREFETCH.name  # so that the two add up
    found = {one.name: one for one in candidates(Training.of(made(), {"x": data.prefetch(2)}))}
    assert NO_PREFETCH.name not in found
    assert found[INPUT.name].against == "now"


class OwnCheckpoint(TrainingCheckpoint):
    """A subclass, as users write them, with a path of its own, from which it reads."""

    def __init__(self, folder):
        super().__init__(folder)
        self.labels_file = __file__

    def on_train_begin(self, logs=None):
        assert self.labels_file == __file__
        super().on_train_begin(logs)


@pytest.mark.parametrize("kind", [TrainingCheckpoint, OwnCheckpoint, keras.callbacks.BackupAndRestore])
def test_no_experiment_goes_on_where_another_ended(tmp_path, kind):
    model = made()
    training = Training.of(model, {"x": X, "y": Y, "epochs": 2, "verbose": 0, "callbacks": [kind(tmp_path)]})
    with training.untouched():
        epoch_ends(training, callback_names(training.callbacks), 1)
        times = FitArm(training)(3)
    assert len(times.repeats_ms[0]) == 3
    assert list(tmp_path.iterdir()) == []
    assert not model._initial_epoch
