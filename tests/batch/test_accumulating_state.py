"""Accumulation switched on and off: what is kept, saved, measured and refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt
from tfopt.batch import accumulate
from tfopt.batch.rounds import Rounds
from tfopt.errors import UnsupportedError

random = np.random.default_rng(0)
X = random.normal(size=(40, 6)).astype("float32")
Y = random.normal(size=(40, 2)).astype("float32")
layers = keras.layers


def net(optimizer="adam", loss="mse", kind=keras.Sequential, hidden=8, **options):
    keras.utils.set_random_seed(1)
    model = kind([keras.Input((6,)), layers.Dense(hidden, activation="tanh"), layers.Dense(2)])
    model.compile(optimizer, loss, jit_compile=False, **options)
    return model


def dataset(batch=4):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


def fit(model, batch=4, **options):
    return model.fit(dataset(batch), shuffle=False, verbose=0, **options)


def assert_same(one, other, tolerance=1e-4):
    values = [[part.numpy() for part in (*model.variables, *model.optimizer.variables)] for model in (one, other)]
    assert len(values[0]) == len(values[1])
    for found, expected in zip(*values, strict=True):
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
def test_switching_keeps_the_optimizers_state():
    expected, model = net(), net()
    variables = [id(variable) for variable in model.variables]
    fit(expected), fit(model)
    for steps, before, batch in ((2, 1, 8), (4, 2, 16), (4, 4, 16), (1, 4, 4)):
        assert accumulate(model, steps) == before
        fit(model)
        fit(expected, batch)
        assert model.optimizer.iterations == expected.optimizer.iterations
    assert_same(model, expected)
    assert [id(variable) for variable in model.variables] == variables
    assert not {"train_step", "apply"} & {*vars(model), *vars(model.optimizer)}


@pytest.mark.slow
def test_it_takes_over_from_keras_own_accumulation():
    expected, model = net(), net(keras.optimizers.Adam(gradient_accumulation_steps=4))
    tfopt.repairs.install("accumulation")
    fit(model, epochs=2), fit(expected, 16, epochs=2)
    assert accumulate(model, 2) == 4
    fit(model), fit(expected, 8)
    assert_same(model, expected)
    assert accumulate(net(keras.optimizers.Adam(gradient_accumulation_steps=3)), 1) == 3


@pytest.mark.slow
def test_a_saved_model_trains_on(tmp_path):
    expected, model = net(), net()
    accumulate(model, 4)
    fit(model), fit(expected, 16)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same(loaded, expected)
    assert accumulate(loaded, 4) == 1
    fit(loaded), fit(expected, 16)
    assert_same(loaded, expected)


def test_a_copy_trains_alone():
    model = net()
    accumulate(model, 4)
    copy = keras.models.clone_model(model)
    copy.compile("adam", "mse")
    fit(copy)
    assert copy.optimizer.iterations == 10
    assert model.optimizer.iterations == 0


@pytest.mark.slow
def test_another_accumulation_by_compile():
    model = net()
    accumulate(model, 4)
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UnsupportedError, match=r"compiled again or .* Call tfopt\.batch\.accumulate\(model, 4\) again"):
        fit(model)
    assert accumulate(model, 2) == 1
    fit(model)
    assert model.optimizer.iterations == 5


@pytest.mark.slow
def test_estimate_counts_the_gradients_kept():
    kept = 4 * sum(np.prod(weight.shape) for weight in net(hidden=512).trainable_weights) / 2**20
    before = tfopt.memory.estimate(net(hidden=512), (X, Y))
    model = net(hidden=512)
    accumulate(model, 4)
    found = tfopt.memory.estimate(model, (X, Y))
    assert found.weights_mib + found.optimizer_mib == pytest.approx(
        before.weights_mib + before.optimizer_mib + kept, abs=1e-3
    )


@pytest.mark.slow
def test_measuring_leaves_an_open_round_alone():
    expected, model = net(), net()
    accumulate(model, 4)
    for x, y in dataset().take(6):
        model.train_on_batch(x, y)
    tfopt.measure.step_time(model, (X[:4] + 5, Y[:4]), steps=5)
    for x, y in dataset().skip(6).take(2):
        model.train_on_batch(x, y)
    for x, y in dataset(16).take(2):
        expected.train_on_batch(x, y)
    assert_same(model, expected)


@pytest.mark.slow
def test_a_function_put_in_front_of_apply_for_a_while_does_not_switch_it_off():
    model, seen = net(), []
    accumulate(model, 4)
    apply = model.optimizer.apply
    vars(model.optimizer)["apply"] = lambda *args: (seen.append(args), apply(*args))[1]
    model.train_on_batch(X[:4], Y[:4])
    del vars(model.optimizer)["apply"]
    model.make_train_function(force=True)
    fit(model)
    assert seen
    assert model.optimizer.iterations == 3


class Silent(keras.Sequential):
    """Applies gradients in another way."""

    def train_step(self, data):
        x, y, _ = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        for weight, gradient in zip(self.trainable_weights, tape.gradient(loss, self.trainable_weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return {"loss": loss}


class Twice(keras.Sequential):
    """Updates twice a batch."""

    def train_step(self, data):
        super().train_step(data)
        return super().train_step(data)


class Added(layers.Dense):
    """Adds a loss to a mask."""

    def call(self, inputs):
        self.add_loss(keras.ops.mean(inputs))
        return super().call(inputs)


def masked(*outputs):
    inputs = keras.Input((6,))
    hidden = layers.Embedding(5, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, [output(hidden) for output in outputs])
    model.compile("sgd", ["mse"] * len(outputs))
    return model


class TwoOptimizers(keras.Sequential):
    """Trains with a second optimizer."""

    def compile(self, *args, **options):
        super().compile(*args, **options)
        self.others = [keras.optimizers.SGD(0.1)]


class SecondOptimizer(TwoOptimizers):
    """Keeps it in an attribute, which TensorFlow notes as well."""

    def compile(self, *args, **options):
        keras.Sequential.compile(self, *args, **options)
        self.other = keras.optimizers.SGD(0.1)


class Traced(keras.Sequential):
    """Decorates its step."""

    @tf.function
    def train_step(self, data):
        return super().train_step(data)


def average(y, y_pred):
    return keras.ops.mean((y - y_pred) ** 2)


REFUSED = {
    "two optimizers": (lambda: net(kind=TwoOptimizers), r"Found: another one in TwoOptimizers\.others"),
    "a second optimizer": (lambda: net(kind=SecondOptimizer), r"Found: another one in SecondOptimizer\.other,"),
    "a tf.function": (lambda: net(kind=Traced), r"Traced\.train_step is a tf\.function\. Remove"),
    "dice": (lambda: net(loss=keras.losses.Dice()), "Found: dice, which is computed from all examples"),
    "tversky": (lambda: net(loss=keras.losses.Tversky(axis=(0, 1))), "Found: tversky, which"),
    "cosine over the examples": (
        lambda: net(loss=keras.losses.CosineSimilarity(axis=0)),
        "Found: cosine_similarity, which is computed from all examples",
    ),
    "cross-entropy over the examples": (
        lambda: net(loss=keras.losses.CategoricalCrossentropy(axis=0)),
        "Found: categorical_crossentropy, which",
    ),
    "a function that sums": (lambda: net(loss=lambda y, p: keras.ops.sum((y - p) ** 2)), "or is a sum over them"),
    "pairs by hand": (
        lambda: net(loss=lambda y, p: keras.ops.mean(keras.ops.matmul(p, keras.ops.transpose(p)), -1)),
        "Found: .*, which",
    ),
    "no updates": (lambda: net(kind=Silent), r"Found: Silent\.train_step, which does not call"),
    "two updates": (lambda: net(kind=Twice), "calls it twice"),
    "sum": (lambda: net(loss=keras.losses.MeanSquaredError("sum")), "a mean over the examples. Found: a sum"),
    "two with masks": (lambda: masked(layers.Dense(2), layers.Dense(2)), "its mask, and another one"),
    "mask and added": (lambda: masked(Added(2)), "its mask, and one that a layer adds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_accumulated_is_refused_in_the_first_step(name):
    make, says = REFUSED[name]
    model = make()
    accumulate(model, 2)
    with pytest.raises(UnsupportedError, match=says):
        model.train_on_batch(np.abs(X[:4]) % 4, [np.zeros((4, 6, 2))] * len(model.outputs) if "mask" in name else Y[:4])


def test_sample_weights_of_a_loss_that_is_one_number_are_refused():
    model = net(loss=average)
    accumulate(model, 2)
    with pytest.raises(UnsupportedError, match="returns one number"):
        model.train_on_batch(X[:4], Y[:4], sample_weight=np.arange(4.0))


def test_a_round_that_is_refused_at_its_end_is_switched_off(monkeypatch):
    def refuse(rounds):
        raise UnsupportedError("train without accumulation")

    model = net()
    accumulate(model, 4)
    model.train_on_batch(X[:4], Y[:4])
    monkeypatch.setattr(Rounds, "end", refuse)
    with pytest.raises(UnsupportedError, match="train without"):
        accumulate(model, 1)
    assert not {"train_step", "apply"} & {*vars(model), *vars(model.optimizer)}
    model.train_on_batch(X[:4], Y[:4])
    assert model.optimizer.iterations == 1


def test_a_probe_leaves_the_variables_of_a_loss_as_they_were():
    mean = tf.Variable(0.0, trainable=False)

    def counting(y, y_pred):
        mean.assign_add(1.0)
        return keras.ops.mean((y - y_pred) ** 2, -1)

    model = net(loss=counting)
    accumulate(model, 2)
    model.train_on_batch(X[:4], Y[:4])
    assert mean.numpy() == 1.0


class OneTarget(keras.Sequential):
    """Computes a loss with a number for a target."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return self.own_loss(self.target, y_pred)


@pytest.mark.parametrize("target", [0.0, tf.constant(0.0)])
def test_a_number_may_be_the_target_of_all_examples(target):
    model, expected = net("sgd", kind=OneTarget), net("sgd", kind=OneTarget)
    for one in (model, expected):
        one.own_loss, one.target = keras.losses.MeanSquaredError(), target
    accumulate(model, 4)
    fit(model), fit(expected, 16)
    assert_same(model, expected)


def test_a_number_as_target_hides_no_loss_of_a_whole_batch():
    class Sums(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.sum((y_true - y_pred) ** 2)

    model = net(kind=OneTarget)
    model.own_loss, model.target = Sums(name="sums"), 0.0
    accumulate(model, 2)
    with pytest.raises(UnsupportedError, match="Found: sums, which"):
        model.train_on_batch(X[:4], Y[:4])


@pytest.mark.slow
def test_a_fit_that_fails_drops_its_open_round():
    expected, model = net("sgd"), net("sgd")
    accumulate(model, 4)
    weights = model.get_weights()

    def interrupt(batch, logs):
        if batch == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(
            X,
            Y * 100,
            batch_size=4,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)],
        )
    assert accumulate(model, 4) == 4
    for found, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, before)
    fit(model), fit(expected, 16)
    assert_same(model, expected)


def test_two_eager_updates_in_a_batch_leave_no_gradient():
    model = net(kind=Twice, run_eagerly=True)
    accumulate(model, 4)
    weights = model.get_weights()
    with pytest.raises(UnsupportedError, match="calls it twice"):
        model.train_on_batch(X[:4], Y[:4])
    accumulate(model, 1)
    for found, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(found, before)


def test_another_model_with_the_same_optimizer_is_refused():
    model, other = net(), net()
    accumulate(model, 2)
    model.optimizer.build(model.trainable_variables)
    other.compile(model.optimizer, "mse", jit_compile=False)
    with pytest.raises(UnsupportedError, match="another model with this optimizer"):
        other.train_on_batch(X[:4], Y[:4])
    assert accumulate(other, 2) == 1
    assert accumulate(model, 1) == 1
    assert "apply" in vars(other.optimizer)  # still accumulates for the other


def over_positives(y_true, y_pred):
    positive = keras.ops.cast(y_true > 0, y_pred.dtype)
    return keras.ops.sum(positive * (y_true - y_pred) ** 2) / keras.ops.maximum(keras.ops.sum(positive), 1.0)


def of_the_hardest(y_true, y_pred):
    errors = keras.ops.mean((y_true - y_pred) ** 2, axis=-1)
    return keras.ops.mean(keras.ops.top_k(errors, min(8, errors.shape[0] or 8))[0])


@pytest.mark.parametrize("loss", [over_positives, of_the_hardest])
def test_a_loss_over_some_of_the_examples_is_refused(loss):
    model = net(loss=loss)
    accumulate(model, 2)
    with pytest.raises(UnsupportedError, match=f"Found: {loss.__name__}, "):
        model.train_on_batch(X[:4], Y[:4])


def test_a_loss_of_pairs_is_refused():
    model = net(loss=keras.losses.circle)
    accumulate(model, 2)
    with pytest.raises(UnsupportedError, match="Found: circle, which is computed from all examples"):
        model.train_on_batch(X[:4], np.arange(4))


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_apply_of_the_users_own_stays(when):
    model, expected, seen = net(), net(), []

    def set_apply(model):
        plain = model.optimizer.apply

        def apply(grads, variables=None):
            seen.append(model)
            plain([0.5 * gradient for gradient in grads], variables)

        vars(model.optimizer)["apply"] = apply
        return apply

    set_apply(expected)
    own = set_apply(model) if when == "before" else None
    accumulate(model, 4)
    own = own or set_apply(model)
    fit(model), fit(expected, 16)
    assert_same(model, expected)
    for steps in (2, 1):
        accumulate(model, steps)
    assert model.optimizer.apply is own
    fit(model), fit(expected)
    assert_same(model, expected)
    assert model in seen


@pytest.mark.slow
@pytest.mark.parametrize("wraps", [True, False])
def test_a_train_step_set_afterwards_stays(wraps):
    model, expected = net(), net()
    accumulate(model, 2)
    ours, plain = model.train_step, keras.Model.train_step
    model.train_step = (lambda data: ours(data)) if wraps else (lambda data: plain(model, data))
    users = model.train_step
    if wraps:
        fit(model), fit(expected, 8)
        assert_same(model, expected)
    else:
        with pytest.raises(UnsupportedError, match="a train_step set since"):
            fit(model)
    assert accumulate(model, 1) == 2
    assert model.train_step is users
    fit(model), fit(expected)
    assert_same(model, expected)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(1, 4), (4, 1)])
def test_switching_in_a_callback(steps):
    model, expected = net(), net()
    tfopt.repairs.install("accumulation")
    accumulate(model, steps[0])
    switch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: accumulate(model, steps[1]) if batch == 3 else None
    )
    callbacks = keras.callbacks.CallbackList([switch], add_history=True, model=model)
    before = list(callbacks.callbacks)
    fit(model, callbacks=callbacks)  # 10 batches: 4 one by one, then 4 + 2; or 4 at once, then 6 one by one
    assert callbacks.callbacks == before
    assert model.optimizer.iterations == (6 if steps[0] == 1 else 7)
    for part in (
        (dataset().take(4), dataset(16).skip(1).take(1), dataset(8).skip(4))
        if steps[0] == 1
        else (
            dataset(16).take(1),
            dataset().skip(4),
        )
    ):
        expected.fit(part, shuffle=False, verbose=0)
    assert_same(model, expected)


def test_arguments():
    with pytest.raises(ValueError, match="Expected steps to be from 1 to 2147483647"):
        accumulate(net(), 2**70)
    with pytest.raises(TypeError, match=r"Expected a keras\.Model"):
        accumulate(None, 2)
    with pytest.raises(TypeError, match="Expected steps to be an integer"):
        accumulate(net(), 2.0)
    with pytest.raises(ValueError, match="Expected steps to be from 1 to"):
        accumulate(net(), 0)
    with pytest.raises(ValueError, match="not compiled"):
        accumulate(keras.Sequential([keras.Input((6,)), layers.Dense(1)]), 2)
    with pytest.raises(ValueError, match="compiled with optimizer=None"):
        accumulate(net(None), 2)
