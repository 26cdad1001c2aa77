import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import first_quick

from tfopt.pipelines import build_pipeline, per_batch
from tfopt.pipelines.shared.elements import expect_paddable, pad_batch
from tfopt.pipelines.stages.batch_stages import PADDING_NOTE

BATCH = 8
RANDOM = np.random.default_rng(0)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # float32: the same sum in another order


def padded(dataset, batch_size=BATCH):
    expect_paddable(dataset.element_spec)
    return dataset.map(lambda *batch: pad_batch(batch, batch_size))


def net(*heads, normalised=False):
    """A net on 5 numbers with one Dense layer for each head, a dict of name and units."""
    keras.utils.set_random_seed(1)
    x = keras.Input((5,))
    hidden = keras.layers.Dense(6, activation="tanh")(x)
    if normalised:
        hidden = keras.layers.BatchNormalization()(hidden)
    outputs = {name: keras.layers.Dense(units, name=name)(hidden) for name, units in heads}
    return keras.Model(x, outputs if len(outputs) > 1 else next(iter(outputs.values())))


def steps_net():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4, 5)), keras.layers.Dense(3)])


def after_a_step(model, loss, batch, **compiled):
    """The loss of a step of plain gradient descent, and the weights behind it."""
    model.compile(keras.optimizers.SGD(1.0), loss, run_eagerly=True, **compiled)
    value = model.train_on_batch(*batch)
    return np.ravel(value)[0], [weight.numpy() for weight in model.trainable_variables]


def expect_same(first, second):
    np.testing.assert_allclose(first[0], second[0], **CLOSE)
    for one, other in zip(first[1], second[1], strict=True):
        np.testing.assert_allclose(one, other, **CLOSE)


def numbers(*shape):
    return RANDOM.normal(size=shape).astype(np.float32)


@settings(max_examples=40)
@given(st.integers(1, 9).flatmap(lambda size: st.tuples(st.integers(1, size), st.just(size))), st.booleans())
def test_the_filling_is_the_batch_again_and_weighs_nothing(counts, weighed):
    count, size = counts
    x = {"number": tf.range(count), "text": tf.as_string(tf.range(count)), "row": tf.random.uniform((count, 2))}
    own = (tf.reshape(tf.range(1, 2 * count + 1), (count, 2)),) if weighed else ()
    filled, y, weight = pad_batch((x, tf.range(count, dtype=tf.float16), *own), size)
    rows = np.arange(size) % count
    assert filled["number"].numpy().tolist() == rows.tolist()
    assert filled["text"].numpy().tolist() == [str(row).encode() for row in rows]
    assert (filled["row"].numpy() == x["row"].numpy()[rows]).all()
    assert y.numpy().tolist() == rows.tolist()
    shares = np.where(np.arange(size) < count, np.float32(size / count), np.float32(0))
    expected = own[0].numpy()[rows] * shares[:, None] if weighed else shares
    assert weight.dtype == tf.float32
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [None, BATCH])
def test_full_batches_are_not_copied(size):
    signature = [tf.TensorSpec((size, 1000)), tf.TensorSpec((size,), tf.int32)]
    function = tf.function(lambda x, y: pad_batch((x, y), BATCH), input_signature=signature)

    def address(tensor):
        return np.asarray(memoryview(tensor)).__array_interface__["data"][0]

    with tf.device("CPU:0"):
        x, y = tf.random.uniform((BATCH, 1000)), tf.range(BATCH)
        result = function(x, y)
    assert [address(tensor) for tensor in result[:2]] == [address(x), address(y)]
    assert result[2].numpy().tolist() == [1.0] * BATCH


def test_batches_of_a_known_size_are_filled_without_a_branch():
    """XLA on a GPU gets the shape of uint8 wrong that comes out of one: (66053, 259) for (5, 3)."""
    function = tf.function(lambda x, y: pad_batch((x, y), BATCH))
    graph = function.get_concrete_function(tf.TensorSpec((5, 3), tf.uint8), tf.TensorSpec((5,), tf.int32)).graph
    assert not {"If", "StatelessIf"} & {operation.type for operation in graph.get_operations()}


SPARSE = keras.losses.SparseCategoricalCrossentropy
SQUARED = keras.losses.MeanSquaredError
CASES = {
    "labels": (lambda: net(("y", 3)), SPARSE, lambda k: (np.arange(k) % 3,)),
    "one column": (lambda: net(("y", 1)), SQUARED, lambda k: (numbers(k, 1),)),
    "rows": (lambda: net(("y", 3)), SQUARED, lambda k: (numbers(k, 3),)),
    "weighed labels": (lambda: net(("y", 3)), SPARSE, lambda k: (np.arange(k) % 3, 0.5 + RANDOM.random(k))),
    "weighed steps": (steps_net, SPARSE, lambda k: (RANDOM.integers(0, 3, (k, 4)), 0.5 + RANDOM.random((k, 4)))),
    "weighed step rows": (steps_net, SQUARED, lambda k: (numbers(k, 4, 3), 0.5 + RANDOM.random((k, 4)))),
}


@pytest.mark.parametrize("reduction", first_quick(["sum_over_batch_size", "mean", "mean_with_sample_weight"]))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", first_quick([5, 1, 8]))
def test_loss_and_gradients_are_those_of_the_batch_alone(case, reduction, count):
    make, loss, target = CASES[case]
    given_keywords = {"from_logits": True} if loss is SPARSE else {}
    model = make()
    batch = (numbers(count, *model.input_shape[1:]), *target(count))
    alone = after_a_step(model, loss(reduction=reduction, **given_keywords), batch)
    filled = tuple(pad_batch(tuple(map(tf.constant, batch)), BATCH))
    expect_same(after_a_step(make(), loss(reduction=reduction, **given_keywords), filled), alone)


@pytest.mark.parametrize("weighed", [False, True])
def test_several_outputs_with_loss_weights(weighed):
    def make():
        return net(("class", 3), ("height", 1))

    y = {"class": np.arange(5) % 3, "height": numbers(5, 1)}
    own = ({"class": RANDOM.random(5), "height": RANDOM.random(5)},) if weighed else ()
    losses = {"class": SPARSE(from_logits=True), "height": SQUARED()}
    options = {"loss_weights": {"class": 0.3, "height": 2.0}}
    batch = tf.nest.map_structure(tf.constant, (numbers(5, 5), y, *own))
    alone = after_a_step(make(), losses, batch, **options)
    expect_same(after_a_step(make(), losses, pad_batch(batch, BATCH), **options), alone)


def test_a_value_that_is_infinite_at_zero_trains():
    def loss(y, prediction):
        return tf.reduce_mean((prediction - tf.math.log(y)) ** 2, axis=-1)

    batch = (tf.constant(numbers(3, 5)), tf.constant([[1.0], [2.0], [3.0]]))
    alone = after_a_step(net(("y", 1)), loss, batch)
    assert np.isfinite(alone[0])
    expect_same(after_a_step(net(("y", 1)), loss, pad_batch(batch, BATCH)), alone)


def test_a_sum_grows_as_the_note_says():
    batch = (tf.constant(numbers(5, 5)), tf.constant(numbers(5, 1)))
    alone, _ = after_a_step(net(("y", 1)), SQUARED(reduction="sum"), batch)
    filled, _ = after_a_step(net(("y", 1)), SQUARED(reduction="sum"), pad_batch(batch, BATCH))
    assert filled == pytest.approx(alone * BATCH / 5, rel=1e-5)
    assert "reduction='sum'" in PADDING_NOTE


def evaluated(model, dataset):
    error = keras.metrics.MeanAbsoluteError
    model.compile("sgd", SQUARED(), metrics=[error("plain")], weighted_metrics=[error("weighted")])
    return model.evaluate(dataset, verbose=0, return_dict=True)


def test_metrics_and_logs_are_what_the_note_says():
    """10 examples, 8 and 2: errors of 0 in the first batch, of 1 and 2 in the second."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")])
    x = np.arange(10, dtype=np.float32)[:, None]
    y = x + np.array([0] * 8 + [1, 2], np.float32)[:, None]
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    alone, found = evaluated(model, dataset), evaluated(model, padded(dataset))
    assert alone == pytest.approx({"loss": 5 / 10, "plain": 3 / 10, "weighted": 3 / 10})
    # Batches count alike: the mean of 0 and 2.5, and of 0 and 1.5; the plain metric counts the filling, 4 times each.
    assert found == pytest.approx({"loss": 2.5 / 2, "plain": 12 / 16, "weighted": 1.5 / 2})
    for told in ("unweighted metrics", "epoch logs"):
        assert told in PADDING_NOTE


def test_batch_normalisation_sees_the_filling_as_the_note_says():
    # 5 of 8: the first 3 count twice in its means. 4 of 8: each counts twice, and the means are the same.
    means = {}
    for count in (4, 5):
        x = np.arange(count, dtype="float32")[:, None] * np.ones(5, "float32")
        batch = (tf.constant(x), tf.constant(x[:, :1]))
        for filled in (False, True):
            model = net(("y", 1), normalised=True)
            after_a_step(model, SQUARED(), pad_batch(batch, BATCH) if filled else batch)
            means[count, filled] = model.non_trainable_variables[0].numpy()
    np.testing.assert_allclose(means[4, True], means[4, False], **CLOSE)
    assert not np.allclose(means[5, True], means[5, False], rtol=0.05)
    assert "batch-norm statistics" in PADDING_NOTE


@pytest.mark.parametrize(("reduction", "same"), [("sum_over_batch_size", False), ("mean_with_sample_weight", True)])
def test_masks_hold_only_under_a_mean_with_sample_weight(reduction, same):
    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((4,)), keras.layers.Embedding(5, 3, mask_zero=True)])

    lengths = np.arange(4) < np.array([[4], [1], [2], [3], [1]])
    x, y = np.where(lengths, 2, 0), RANDOM.integers(0, 3, (5, 4))
    batch = tuple(map(tf.constant, (x, y, np.ones((5, 4), np.float32))))
    loss = SPARSE(from_logits=True, reduction=reduction)
    alone, _ = after_a_step(make(), loss, batch)
    filled, _ = after_a_step(make(), loss, pad_batch(batch, BATCH))
    assert (abs(filled / alone - 1) < 1e-5) == same
    assert "mask" in PADDING_NOTE


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec((None, *shape), dtype)


@pytest.mark.parametrize(
    ("batches", "text"),
    [
        (spec(5), r"examples \(x, y\) or \(x, y, sample_weight\)"),
        ({"x": spec(5), "y": spec()}, r"examples \(x, y\)"),
        ((spec(5),), r"examples \(x, y\)"),
        ((spec(), spec(), spec(), spec()), r"examples \(x, y\)"),
        ((tf.RaggedTensorSpec((None, None)), spec()), "dense tensors of known rank. Found RaggedTensorSpec"),
        ((spec(5), tf.SparseTensorSpec((None, 3))), "dense tensors of known rank. Found SparseTensorSpec"),
        ((tf.TensorSpec(None), spec()), "known rank. Found TensorSpec"),
    ],
)
def test_others_are_refused_with_a_remedy(batches, text):
    with pytest.raises(ValueError, match=text) as error:
        expect_paddable(batches)
    assert "remainder='keep' or 'drop'" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "refused"),
    [((), False), ((10,), False), ((BATCH,), True), ((None,), True), ((4, 3), True)],
)
def test_targets_with_perhaps_several_losses_need_weights(shape, refused):
    examples = tf.data.Dataset.from_generator(list, output_signature=(spec(5), {"a": spec(), "b": spec(*shape)}))
    if refused:
        with pytest.raises(
            ValueError, match=r"one loss an example.* with batch_size=8.* tf.ones\(\(steps,\)\)"
        ) as error:
            padded(examples)
        assert "remainder='keep' or 'drop'" in str(error.value)
    else:
        padded(examples)
    weighed = examples.map(lambda x, y: (x, y, tf.ones_like(y["a"])))
    assert padded(weighed).element_spec[2] == tf.TensorSpec((BATCH,))


def test_one_example_a_batch_needs_no_weights():
    assert pad_batch((tf.zeros((1, 5)), tf.zeros((1, 1))), 1)[2].numpy().tolist() == [1.0]


@pytest.mark.parametrize("count", [8, 10])  # static, and with a smaller last batch
def test_a_function_that_adds_examples_is_refused(count):
    """Else padding would cut each batch to the size of those before."""

    def twice(x, y):
        return tf.concat([x, -x], 0), tf.concat([y, y], 0)

    data = np.arange(count, dtype="float32"), np.arange(count)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=r"no more than the 4 examples.*Found 8"):
        list(build_pipeline(data, batch_size=4, augment=per_batch(twice), remainder="pad"))
