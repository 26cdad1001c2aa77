"""Training on a loader through a pipeline is training on the loader itself, bit for bit."""

import functools

import keras
import numpy as np
import pytest

from tfopt.pipelines import build_pipeline


def batches(sizes=(4, 4, 2)):
    for size in sizes:
        yield np.arange(size, dtype="float32")[:, None], np.arange(size)


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        draws = np.random.default_rng(index)
        return draws.random((4, 1), "float32"), draws.random(4, "float32")


def grain_numbers():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    examples = grain.MapDataset.source(np.arange(10)).seed(3).shuffle()
    return examples.map(lambda number: (np.full(1, number, "float32"), np.float32(number))).batch(4)


def py_dataset(**keywords):
    return lambda: Numbered(**keywords)


# Keras reads one generator in all epochs.
ENDLESS = functools.partial(batches, (4, 4, 2) * 2)
KINDS = {
    "threads": (py_dataset(workers=3, max_queue_size=2), {}),
    "processes": (py_dataset(workers=2, use_multiprocessing=True), {}),
    "grain": (grain_numbers, {}),
    "function": (ENDLESS, {"steps_per_epoch": 3}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras does not ask Grain for its length
@pytest.mark.parametrize("kind", KINDS)
def test_training_on_it_is_training_on_the_loader(kind):
    make, fitting = KINDS[kind]

    def trained(data, validation):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
        validating = {} if kind == "function" else {"validation_data": validation}
        found = model.fit(data, epochs=2, verbose=0, shuffle=False, **fitting, **validating)
        return model.get_weights(), found.history

    weights, history = trained(make(), make())
    options = {"shuffle": False} if isinstance(make(), Numbered) else {}
    source = make if kind == "function" else make()
    own_weights, own_history = trained(build_pipeline(source, **options), build_pipeline(source, training=False))
    assert own_history == history
    for ours, expected in zip(own_weights, weights, strict=True):
        np.testing.assert_array_equal(ours, expected)
