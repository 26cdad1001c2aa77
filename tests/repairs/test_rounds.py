"""What `fit` does at the end of an epoch: batches left over by gradient accumulation, and data of unknown length."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfopt.fit
from tfopt import repairs

BATCHES, SIZE = 10, 4
random = np.random.default_rng(0)
X = random.normal(size=(BATCHES * SIZE, 3)).astype("float32")
Y = random.normal(size=(BATCHES * SIZE, 1)).astype("float32")


def batches(count=BATCHES, known=True):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(SIZE).take(count)
    return data if known else data.filter(lambda x, y: True)


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


LIMIT = keras.constraints.MaxNorm(0.8)


def net(optimizer, **options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_constraint=LIMIT)])
    model.compile(optimizer, "mse", **{"jit_compile": False, **options})
    optimizer.build(model.trainable_variables)  # XLA cannot
    return model


def by_hand(model, epochs, steps, make):
    """Trains on the mean of each round's gradients with a plain optimizer; a round ends with its epoch."""
    optimizer = make()
    weights = [weight.numpy() for weight in model.trainable_variables]
    variables = [keras.Variable(weight) for weight in weights]
    for count in epochs:
        for start in range(0, count, steps):
            gradients = []
            for at in range(start, min(start + steps, count)):
                x, y = X[SIZE * at :][:SIZE], Y[SIZE * at :][:SIZE]
                error = x @ variables[0].numpy() + variables[1].numpy() - y
                gradients.append([2 * x.T @ error / SIZE, 2 * error.mean(0)])
                if len(gradients) == min(steps, count - start):
                    optimizer.apply([np.mean(part, 0) for part in zip(*gradients, strict=True)], variables)
                variables[0].assign(LIMIT(variables[0].value))  # with each batch
    return [variable.numpy() for variable in variables]


OPTIMIZERS = {
    "schedule": lambda **rest: keras.optimizers.SGD(schedule(), momentum=0.9, **rest),
    "adam, clipped": lambda **rest: keras.optimizers.Adam(schedule(), global_clipnorm=0.5, **rest),
    "weight decay": lambda **rest: keras.optimizers.AdamW(0.05, weight_decay=0.1, **rest),
}


out_of_data = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras' words for unknown lengths


@pytest.mark.slow
@out_of_data
@pytest.mark.parametrize("way", ["plain", "overlapped", "jit", "executions", "epochs at once"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_round_ends_with_its_epoch(name, way):
    repairs.install(*repairs.ONE_DEVICE)
    options = {"jit": {"jit_compile": True}, "executions": {"steps_per_execution": 3}}.get(way, {})
    model = net(OPTIMIZERS[name](gradient_accumulation_steps=4), **options)
    expected = by_hand(model, [10, 10, 9], 4, OPTIMIZERS[name])
    if way == "overlapped":
        tfopt.fit.overlap(model)
    if way == "epochs at once":
        model.fit(batches(), epochs=2, shuffle=False, verbose=0)
    else:
        for _ in range(2):
            model.fit(batches(), shuffle=False, verbose=0)
    model.fit(batches(9, known=False), shuffle=False, verbose=0)
    for found, weights in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, weights, rtol=1e-5, atol=1e-6)
    assert model.optimizer.iterations == 9
    assert model.optimizer.gradient_accumulation_steps == 4


@pytest.mark.slow
def test_validation_and_checkpoints_see_the_update(tmp_path):
    repairs.install(*repairs.ONE_DEVICE)
    model = net(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    expected = by_hand(model, [10], 4, lambda: keras.optimizers.SGD(0.1))
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.weights.h5", save_weights_only=True)
    history = model.fit(batches(), validation_data=batches(), shuffle=False, verbose=0, callbacks=saved).history
    assert history["val_loss"] == [pytest.approx(model.evaluate(batches(), verbose=0))]
    model.load_weights(tmp_path / "1.weights.h5")
    for found, weights in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_allclose(found, weights, rtol=1e-5)


def test_a_callback_list_is_taken_as_it_is():
    repairs.install(*repairs.ONE_DEVICE)
    model = net(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    model.fit(batches(), shuffle=False, callbacks=keras.callbacks.CallbackList(add_history=True, model=model))
    assert model.optimizer.iterations == 3


@pytest.mark.slow
def test_a_weight_without_gradients_is_left_alone():
    repairs.install(*repairs.ONE_DEVICE)

    class Unused(keras.layers.Dense):
        def build(self, shape):
            super().build(shape)
            self.extra = self.add_weight(shape=(2,), initializer="ones", name="extra")

    model = keras.Sequential([keras.Input((3,)), Unused(1)])
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5, gradient_accumulation_steps=4), "mse")
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        model.fit(batches(), shuffle=False, verbose=0)
    assert model.layers[0].extra.numpy().tolist() == [1, 1]


def test_an_update_that_fails_leaves_the_round_open(monkeypatch):
    repairs.install(*repairs.ONE_DEVICE)
    model = net(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4))
    model.fit(batches(4), shuffle=False, verbose=0)

    def fail(*args):
        raise RuntimeError("full")

    monkeypatch.setattr(model.optimizer, "apply", fail)
    with pytest.raises(RuntimeError, match="full"):
        model.fit(batches(2), shuffle=False, verbose=0)
    assert (int(model.optimizer._iterations), model.optimizer.gradient_accumulation_steps) == (6, 4)


@out_of_data
@pytest.mark.parametrize("repaired", [True, False])
@pytest.mark.parametrize("way", ["unknown", "numpy"])
def test_data_of_unknown_length_counts_its_steps(way, repaired):
    if repaired:
        repairs.install("extra_step")
    keras.utils.set_random_seed(1)
    drop = keras.layers.Dropout(0.5, seed=3)
    model = keras.Sequential([keras.Input((3,)), drop, keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    if way == "numpy":
        for _ in range(6):
            model.fit(X[:12], Y[:12], batch_size=4, verbose=0)
    else:
        model.fit(batches(3, known=False), epochs=6, shuffle=False, verbose=0)
    counted = int(model.optimizer.iterations)
    if repaired or way == "numpy":
        assert counted == 18
    else:  # a GPU may see the end of the data before it counts
        assert 18 < counted <= 24


@pytest.mark.slow
@out_of_data
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("built", [True, False])
def test_variables_can_be_created_by_a_step(built, jit_compile):
    repairs.install("extra_step")
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(2, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers] if built else layers)
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.fit(batches(3, known=False), epochs=2, shuffle=False, verbose=0)
    assert model.optimizer.iterations == 6


@pytest.mark.slow
@out_of_data
def test_training_on_data_of_unknown_length_is_training_on_the_same_data():
    repairs.install("extra_step")
    trained = []
    for known in (True, False):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((3,)), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile(keras.optimizers.Adam(schedule()), "mse", jit_compile=False)
        model.fit(batches(3, known), epochs=4, shuffle=False, verbose=0)
        trained.append([value.numpy() for value in [*model.variables, *model.optimizer.variables]])
    assert all(map(np.array_equal, *trained))
