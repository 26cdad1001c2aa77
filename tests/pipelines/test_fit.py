import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, small_net, state, summed_in_one_order
from quick import campaign, first_quick
from snippets import ROOT
from versions import make_unknown, since_keras

from tfopt import repairs
from tfopt.errors import UnsupportedError
from tfopt.internals.sources import find
from tfopt.pipelines import build_pipeline
from tfopt.repairs.fit_data import mark_order_decided

EpochIterator = getattr(*find("keras.src.trainers.epoch_iterator:EpochIterator"))


def shift(image, label):
    return image + 0.25, label


def jitter(image, label, *, seed):
    return image + tf.random.stateless_normal((), seed), label


def recorded(dataset, seen):
    """Passes batches on as they are, and notes each that fit takes."""

    def note(images, labels):
        seen.append((images.numpy(), labels.numpy()))
        return images, labels

    def pass_on(*batches):
        passed = tf.py_function(note, batches, [tensor.dtype for tensor in batches])
        for tensor, same in zip(passed, batches, strict=True):
            tensor.set_shape(same.shape)
        return tuple(passed)

    return dataset.map(pass_on)


@pytest.fixture(autouse=True)
def _cleared_session():
    yield
    keras.backend.clear_session()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    first_quick(
        [
            {},
            {"batch_size": 9},  # the last batch is kept: to drop it would leave out 10 %
            {"transform": shift, "augment": jitter},
            {"transform": shift, "cache": None},
            {"shuffle": False},
        ],
        2,
    )
    + campaign([{"batch_size": 64}]),
)
def test_fit_computes_what_keras_computes_on_the_same_batches(options):
    seen = []
    options = {"batch_size": 16} | options
    dataset = build_pipeline(batch(50), seed=5, **options)
    piped, plain = small_net(), small_net()
    with summed_in_one_order():
        history = piped.fit(recorded(dataset, seen), epochs=3, shuffle=False, verbose=0).history
    assert len(seen) == 3 * len(dataset)
    kept = sum(len(labels) for _, labels in seen[: len(dataset)])
    assert kept == (48 if options["batch_size"] == 16 and options.get("shuffle", True) else 50)
    keras.utils.set_random_seed(7)
    losses = []
    for epoch in range(3):
        images, labels = (
            np.concatenate(part) for part in zip(*seen[len(dataset) * epoch :][: len(dataset)], strict=True)
        )
        given = {"batch_size": options["batch_size"], "shuffle": False, "verbose": 0}
        with summed_in_one_order():
            losses += plain.fit(images, labels, **given).history["loss"]
    assert history["loss"] == losses
    for (name, found), (_, expected) in zip(state(piped), state(plain), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
    in_order = np.array_equal(seen[0][1], seen[len(dataset)][1])
    assert in_order is not options.get("shuffle", True)


@pytest.mark.slow
def test_evaluate_and_predict_see_every_example_in_order():
    images, labels = batch(50)
    model = small_net()
    dataset = build_pipeline((images, labels), batch_size=16, training=False)
    np.testing.assert_array_equal(model.predict(dataset, verbose=0), model.predict(images, batch_size=16, verbose=0))
    assert model.evaluate(dataset, verbose=0) == model.evaluate(images, labels, batch_size=16, verbose=0)


# Warnings are errors: what says nothing passes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False},
        {"training": False, "shuffle": True},
        {"remainder": "pad"},
        {"device": "CPU:0"},
        {"cache": "device"},
        {"cache": "./cache", "transform": shift},
    ],
    ids=lambda options: " ".join(options) or "defaults",
)
def test_fit_says_nothing_of_its_shuffle_for_a_pipeline(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # As `fit` does, whose default is shuffle=True.
    dataset = build_pipeline(batch(50), batch_size=16, **options)
    assert EpochIterator(x=dataset, class_weight=None, shuffle=True).data_adapter.get_tf_dataset() is dataset


@pytest.mark.slow
def test_fit_says_nothing_with_validation_data_and_class_weights():
    images, labels = batch(30)
    train, validation = (build_pipeline((images, labels), batch_size=10, training=kind) for kind in (True, False))
    small_net().fit(train, validation_data=validation, class_weight={9: 2.0}, verbose=0)


@pytest.mark.slow
def test_fit_says_nothing_for_a_pipeline_distributed_over_replicas():
    dataset = build_pipeline(batch(50), batch_size=16)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = small_net(jit_compile=False)  # XLA's functions lie on the GPU where there is one
    model.fit(dataset, verbose=0)
    apart = strategy.distribute_datasets_from_function(lambda context: dataset)
    EpochIterator(x=mark_order_decided(apart), steps_per_epoch=3, shuffle=True)


@pytest.mark.slow
def test_fit_warns_of_a_dataset_of_the_users_own_as_ever():
    """If stock Keras no longer warns, the repair "shuffle_warning" may go."""

    def warned(dataset):
        with pytest.warns(UserWarning, match="`shuffle=True` was passed, but will be ignored") as found:
            EpochIterator(x=dataset, shuffle=True)
        return [(str(each.message), each.filename, each.lineno) for each in found]

    own = tf.data.Dataset.from_tensor_slices(batch(50)).batch(16)
    stock = warned(own)
    pipeline = build_pipeline(batch(50), batch_size=16)
    assert repairs.SHUFFLE_WARNING.installed
    assert warned(own) == warned(pipeline.take(2)) == stock, "its text, and the place it points at"
    assert warned(build_pipeline(batch(50), batch_size=16, training=False)) == stock, "trained on in one order"
    repairs.remove("shuffle_warning")
    assert warned(pipeline) == stock


@since_keras("3.14")  # which warns
def test_a_keras_that_is_not_known_goes_on_warning(monkeypatch):
    make_unknown(monkeypatch, repairs.SHUFFLE_WARNING)
    with pytest.raises(UnsupportedError, match="It stays unpatched, and this may still be wrong: fit warns"):
        repairs.install("shuffle_warning")
    dataset = build_pipeline(batch(50), batch_size=16)
    with pytest.warns(UserWarning, match="`shuffle=True` was passed"):
        EpochIterator(x=dataset, shuffle=True)


@pytest.mark.slow
def test_a_pipeline_built_before_keras_is_imported():
    code = """
import sys, warnings
import numpy as np
from tfopt.pipelines import build_pipeline
dataset = build_pipeline((np.zeros((8, 1), "float32"), np.zeros(8)), batch_size=4)
import keras
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", run_eagerly=True)
warnings.simplefilter("error", UserWarning)
model.fit(dataset, verbose=0)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
