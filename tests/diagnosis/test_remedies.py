"""The lines that a diagnosis proposes fit the data of the training."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfopt.diagnosis import remedies
from tfopt.diagnosis.candidates import prefetched
from tfopt.pipelines import plan_pipeline

X, Y = np.zeros((32, 4), "float32"), np.zeros((32, 1), "float32")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, number):
        return X[:8], Y[:8]


class Own(keras.callbacks.Callback):
    pass


DATA = {
    "arrays": X,
    "dataset": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8),
    "PyDataset": Batches(),
    "plan": plan_pipeline((X, Y), batch_size=8),
    "generator": iter([(X, Y)]),
}


def training(data="arrays", **given):
    usual = {"validation_split": 0.0, "epochs": 1, "epochs_per_validation": 1}
    return SimpleNamespace(data=DATA[data], examples=8, **usual | given)


@pytest.mark.parametrize(
    ("data", "batch", "shapes", "opened"),
    [
        ("arrays", "model.fit(..., batch_size=16)", 'remainder="drop")', "# Fewer and longer epochs"),
        ("dataset", "batch(16)  # where", "drop_remainder=True", "dataset.repeat()"),
        ("PyDataset", "# Let its __getitem__ return 16", "# Give all batches one shape", "# Fewer and longer"),
        ("plan", "batch_size=16  # in build_pipeline", 'remainder="drop"  # in build_pipeline', "# Fewer and longer"),
        ("generator", "# Let the generator yield 16", "# Give all batches one shape", "# Fewer and longer"),
    ],
)
def test_lines_that_fit_the_data(data, batch, shapes, opened):
    assert batch in remedies.larger_batch(training(data))
    assert shapes in remedies.shapes(training(data))
    assert opened in remedies.opened_each_epoch(training(data))


def test_slow_input_of_a_py_dataset_with_workers():
    one = SimpleNamespace(data=Batches(workers=4), examples=8, validation_split=0.0)
    assert "use_multiprocessing" in remedies.slow_input(one)
    assert "workers=4" in remedies.slow_input(training("PyDataset"))


@pytest.mark.parametrize(
    ("given", "line", "saved"),
    [
        ({"epochs": 10}, "validation_freq=5", 0.8),
        ({"epochs": 10, "epochs_per_validation": 2}, "validation_freq=10", 0.8),
        ({"epochs": 1}, "validation_steps=3", 0.75),  # of 12 batches; validation_freq=5 would switch it off
        ({"epochs": 4}, "validation_steps=3", 0.75),
    ],
)
def test_less_validation_is_not_none(given, line, saved):
    found, share = remedies.validation(training(**given), 12)
    assert line in found
    assert share == pytest.approx(saved)


def test_callbacks_of_keras_have_options_of_their_own():
    assert "save_freq" in remedies.in_each_batch(keras.callbacks.TensorBoard("logs"))
    assert "on_train_batch_end" in remedies.in_each_batch(Own())


def test_a_prefetch_before_options_counts():
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    assert prefetched(data.with_options(options)) is not None
    assert prefetched(data.prefetch(2).with_options(options)) is None
