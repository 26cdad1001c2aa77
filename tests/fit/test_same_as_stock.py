"""What is trained and logged is that of stock `fit`, bit for bit, whatever is trained and on whatever."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from fitting import BATCH, Pair, Steps, Trace, X, Y, compiled, dataset, dense_net
from quick import first_quick

WEIGHTS = np.linspace(0.1, 2, 40).astype("float32")


@pytest.fixture(scope="module")
def pair():
    """One for all inputs: what was traced for one serves the next, as for whoever fits a model again."""
    return Pair()


class Batches(keras.utils.PyDataset):
    """Three batches, in another order in each epoch."""

    epoch = 0

    def __len__(self):
        return 3

    def __getitem__(self, index):
        at = (index + self.epoch) % 3 * 12
        return X[at : at + 12], Y[at : at + 12]

    def on_epoch_end(self):
        self.epoch += 1


def endless():
    while True:
        for start in range(0, 40, 8):
            yield X[start : start + 8], Y[start : start + 8]


INPUTS = {
    "arrays, shuffled": lambda: {"x": X, "y": Y, "batch_size": BATCH},
    "arrays, weighted": lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS, "validation_split": 0.25},
    "classes weighted": lambda: {"x": dataset(), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5}},
    "dataset": lambda: {"x": dataset(), "validation_data": dataset().take(2), "validation_freq": 2},
    "dataset, one iterator": lambda: {"x": dataset(batch=4), "steps_per_epoch": 3, "validation_data": (X, Y)},
    "endless": lambda: {"x": dataset().repeat(), "steps_per_epoch": 4, "validation_data": (X, Y, WEIGHTS)},
    "generator": lambda: {"x": endless(), "steps_per_epoch": 4},
    "PyDataset": lambda: {"x": Batches(workers=2, max_queue_size=2), "validation_data": Batches()},
    "late start": lambda: {"x": dataset(), "initial_epoch": 1},
    "one batch": lambda: {"x": dataset(batch=40), "validation_data": dataset(), "validation_steps": 1},
}


@pytest.mark.parametrize("arguments", first_quick(INPUTS.values(), 5), ids=INPUTS)
def test_whatever_the_input(pair, arguments):
    def train(model):
        trace, given = Trace(), arguments()
        shuffle = isinstance(given["x"], np.ndarray)
        history = model.fit(**given, epochs=3, verbose=0, shuffle=shuffle, callbacks=[trace])
        return history.history, history.epoch, history.params, trace.calls

    pair.train(train)


def test_evaluate_and_predict(pair):
    def train(model):
        trace = Trace()
        found = [model.evaluate(X, Y, verbose=0, sample_weight=WEIGHTS), model.evaluate(dataset(), verbose=0, steps=2)]
        found.append(model.evaluate(dataset(), verbose=0, return_dict=True, callbacks=[trace]))
        predicted = [model.predict(data, verbose=0, steps=2).tobytes() for data in (X, dataset())]
        return found, predicted, trace.calls

    results = pair.train(train)
    assert [name for name, *_ in results[-1]] == ["test"] * 3


def test_data_that_ends_too_early(pair):
    def train(model):
        trace = Trace()
        with pytest.warns(UserWarning, match="ran out of data"):
            history = model.fit(dataset(), steps_per_epoch=2, epochs=3, verbose=0, shuffle=False, callbacks=[trace])
        return history.history, [call for call, *_ in trace.calls]

    pair.train(train)


class OwnStep(keras.Model):
    """A train_step of its own, whose logs are nested and no metrics of the model."""

    def __init__(self, regularizer=None):
        super().__init__()
        self.dense = keras.layers.Dense(4, activity_regularizer=regularizer)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"zeta": loss, "nested": {"twice": 2 * loss, "b": tf.reduce_max(x)}, "shape": tf.shape(x)}


class OwnVariables(OwnStep):
    """An eager step that returns a variable, which the next step changes."""

    def train_step(self, data):
        logs = super().train_step(data)
        return logs["nested"] | {"steps": self.optimizer.iterations}


class OwnLoss(OwnStep):
    """A compute_loss of its own, and a loss that a layer adds."""

    train_step = keras.Model.train_step

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 0.1 * tf.reduce_mean(y_pred**2)


def two_headed():
    """Inputs by name, two outputs, a metric with state."""
    inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((8,), name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
    one = keras.layers.Dense(1, activation="sigmoid", name="one")(joined)
    two = keras.layers.Dense(4, name="two")(joined)
    model = keras.Model(inputs, {"one": one, "two": two})
    metrics = {"one": [keras.metrics.AUC(name="auc", num_thresholds=20)], "two": ["mae"]}
    return compiled(model, loss={"one": "binary_crossentropy", "two": "mse"}, metrics=metrics)


def half_precision():
    """Loss scaling that begins so high that the first steps overflow and are skipped."""
    inner = keras.optimizers.Adam()
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**20)
    body = keras.layers.Dense(6, activation="relu", dtype="mixed_float16")
    model = keras.Sequential([keras.Input((8,)), body, keras.layers.Dense(4, dtype="float32")])
    return compiled(model, optimizer=optimizer)


def with_batch_norm():
    layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    return compiled(keras.Sequential([keras.Input((8,)), *layers]), optimizer="adam", metrics=["accuracy", Steps()])


MODELS = {
    "batch norm": (with_batch_norm, (X, Y)),
    "several steps an execution": (lambda: dense_net(steps_per_execution=2), (X, Y)),
    "eager": (lambda: dense_net(run_eagerly=True), (X, Y)),
    "own train_step": (lambda: compiled(OwnStep(), metrics=None), (X, Y)),
    "own variables, eager": (lambda: compiled(OwnVariables(), metrics=None, run_eagerly=True), (X, Y)),
    "own compute_loss": (lambda: compiled(OwnLoss("l2")), (X, Y)),
    "two heads": (two_headed, ({"a": X, "b": -X}, {"one": Y[:, None] % 2, "two": X[:, :4]})),
    "float16": (half_precision, (X, Y)),
    "averaged weights, summed gradients": (
        lambda: dense_net(optimizer=keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2)),
        (X, Y),
    ),
}


@pytest.mark.parametrize(("make", "data"), first_quick(MODELS.values(), 4), ids=MODELS)
def test_whatever_the_model(make, data):
    def train(model):
        trace = Trace()
        history = model.fit(*data, batch_size=BATCH, epochs=2, verbose=0, callbacks=[trace])
        return repr((history.history, trace.calls))  # there may be arrays among the logs

    Pair(make).train(train)


def unlabelled():
    """Batches with a None in them."""
    for start in range(0, 40, 16):
        yield X[start : start + 16], None, WEIGHTS[start : start + 16]


@pytest.mark.parametrize("data", [lambda: X, unlabelled], ids=["inputs alone", "a None among the parts"])
def test_batches_that_lack_parts(data):
    class Auto(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is None
            loss = tf.reduce_mean((x - y_pred) ** 2, axis=-1)
            return tf.reduce_mean(loss if sample_weight is None else loss * sample_weight)

    def make():
        return compiled(Auto([keras.Input((8,)), keras.layers.Dense(8)]), loss=None, metrics=None)

    Pair(make).train(lambda model: model.fit(data(), steps_per_epoch=2, verbose=0, shuffle=False).history)


def test_ragged_and_sparse_batches():
    ragged = tf.ragged.constant([[1, 2], [3], [4, 5, 6], [7]] * 5)
    batches = tf.data.Dataset.from_tensor_slices(((ragged, tf.sparse.from_dense(X[:20, :4])), Y[:20])).batch(8)

    class Mixed(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.dense = keras.layers.Embedding(10, 4), keras.layers.Dense(4)

        def call(self, inputs):
            words = self.embedding(inputs[0].to_tensor(shape=(None, 3)))
            return self.dense(tf.reduce_mean(words, axis=1) + tf.sparse.to_dense(inputs[1]))

    pair = Pair(lambda: compiled(Mixed()))
    pair.train(lambda model: model.fit(batches, epochs=2, verbose=0, shuffle=False).history)


def test_a_smaller_last_batch_is_not_traced_anew():
    traced = []

    class Counted(keras.Sequential):
        def train_step(self, data):
            traced.append(data[0].shape.as_list())
            return super().train_step(data)

    def train(model):
        traced.clear()
        model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0)
        model.fit(dataset(batch=10), verbose=0, shuffle=False)
        return list(traced)

    traces = Pair(lambda: compiled(Counted([keras.Input((8,)), keras.layers.Dense(4)]))).train(train)
    assert all(shape == [None, 8] for shape in traces)


@pytest.mark.slow
def test_other_ways_to_train_in_between(tmp_path):
    def train(model):
        model.fit(X, Y, verbose=0)
        seen = [model.train_on_batch(X[:32], Y[:32], return_dict=True), model.test_on_batch(X[:8], Y[:8])]
        seen.append(model.predict_on_batch(X[:8]).tobytes())
        model.save_weights(tmp_path / "kept.weights.h5")
        model.fit(X, Y, verbose=0)
        model.load_weights(tmp_path / "kept.weights.h5")
        return [*seen, model.fit(dataset(batch=10), epochs=2, verbose=0, shuffle=False).history]

    Pair(lambda: compiled(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]))).train(train)
