import keras
import numpy as np
import pytest
import tensorflow as tf
from models import batch, small_net, state
from quick import first_quick

from tfopt.pipelines import build_pipeline


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


@pytest.mark.parametrize(
    "options",
    first_quick([{}, {"transform": shift, "augment": jitter}, {"transform": shift, "cache": None}]),
)
def test_fit_computes_what_keras_computes_on_the_same_batches(options):
    seen = []
    dataset = build_pipeline(batch(50), batch_size=16, seed=5, **options)
    piped, plain = small_net(), small_net()
    history = piped.fit(recorded(dataset, seen), epochs=3, shuffle=False, verbose=0).history
    assert len(seen) == 3 * len(dataset)
    keras.utils.set_random_seed(7)
    losses = []
    for epoch in range(3):
        images, labels = (np.concatenate(part) for part in zip(*seen[3 * epoch : 3 * epoch + 3], strict=True))
        losses += plain.fit(images, labels, batch_size=16, shuffle=False, verbose=0).history["loss"]
    assert history["loss"] == losses
    for (name, found), (_, expected) in zip(state(piped), state(plain), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)
    assert not np.array_equal(seen[0][1], seen[3][1]), "two epochs in one order"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"transform": shift, "augment": jitter}])
def test_fit_under_a_seed_is_the_same_again(options):
    def trained():
        model = small_net()
        model.fit(build_pipeline(batch(50), batch_size=16, seed=5, **options), epochs=2, shuffle=False, verbose=0)
        return state(model)

    for (name, found), (_, expected) in zip(trained(), trained(), strict=True):
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_evaluate_and_predict_see_every_example_in_order():
    images, labels = batch(50)
    model = small_net()
    dataset = build_pipeline((images, labels), batch_size=16, training=False)
    np.testing.assert_array_equal(model.predict(dataset, verbose=0), model.predict(images, batch_size=16, verbose=0))
    assert model.evaluate(dataset, verbose=0) == model.evaluate(images, labels, batch_size=16, verbose=0)


@pytest.mark.slow
def test_the_optimizer_counts_the_steps_that_were_taken():
    model = small_net()
    dataset = build_pipeline(batch(50), batch_size=16)
    model.fit(dataset, epochs=4, shuffle=False, verbose=0)
    assert int(model.optimizer.iterations) == 4 * len(dataset) == 12
